# Two images, described in docs/containers.md:
#
#   docker build -t rlmath .                        # GPU nodes: CUDA 13, Python 3.12, the versions of requirements/gpu.txt
#   docker build -t rlmath:cpu --target cpu .       # no GPU: Python 3.11, requirements/cpu.txt; runs `make demo`
#
# Both keep the code in /opt/rlmath and run as any user: what they write goes to the folders that are mounted, to
# /opt/rlmath/outputs and to /tmp, which is HOME, because the user of a run need not be known inside.


# ---------------------------------------------------------------------------------------------------------------------
FROM debian:12.12-slim AS cpu

ARG DEBIAN_FRONTEND=noninteractive
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1

# vLLM needs libnuma1, and torch compiles parts of its sampler with g++ and Python's headers when a run starts.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates g++ libnuma1 make python3.11 python3.11-dev python3.11-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/rlmath
COPY . .
# Files keep the modes that they have outside. `make` locks .venv.lock whenever it looks whether the environment is
# current, whoever runs it.
RUN chmod -R a+rX . \
    && make venv \
    && chmod a+w .venv.lock \
    && mkdir -m 1777 outputs \
    && useradd --uid 10001 --no-create-home --home-dir /tmp rlmath

USER 10001:10001
ENV HOME=/tmp \
    LOGNAME=rlmath
CMD ["make", "demo"]


# ---------------------------------------------------------------------------------------------------------------------
FROM nvidia/cuda:13.0.3-devel-ubuntu24.04 AS build

# The GPUs that apex is compiled for: 9.0 is H100, H200 and H800; 10.0 is B200. Fewer compile faster.
ARG CUDA_ARCHS="9.0;10.0"
# Compilers at a time, as torch's builder of extensions reads it; each takes some GB of memory.
ARG MAX_JOBS=8
# Of NVIDIA's repository. The package named apex on the package index is something else.
ARG APEX_COMMIT=6424da3b4faa6c8f062da4a48c424fff3f02d42d
ARG DEBIAN_FRONTEND=noninteractive
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV CUDA_HOME=/usr/local/cuda \
    PATH=/opt/venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        build-essential ca-certificates git python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

# The lock, but for the one package that compiles against the torch installed here.
COPY requirements/gpu.txt /tmp/gpu.txt
RUN python3.12 -m venv /opt/venv \
    && grep -v '^transformer-engine-torch==' /tmp/gpu.txt > /tmp/wheels.txt \
    && pip install --no-deps --only-binary :all: -r /tmp/wheels.txt

# The torch part of Transformer Engine, with the headers of the CUDA packages that are used at run time.
RUN grep '^transformer-engine-torch==' /tmp/gpu.txt > /tmp/source.txt \
    && NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1 \
        pip install --no-deps --no-build-isolation -r /tmp/source.txt

RUN git init -q /tmp/apex \
    && git -C /tmp/apex fetch -q --depth 1 https://github.com/NVIDIA/apex "$APEX_COMMIT" \
    && git -C /tmp/apex checkout -q FETCH_HEAD \
    && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 TORCH_CUDA_ARCH_LIST="$CUDA_ARCHS" \
        pip install --no-deps --no-build-isolation /tmp/apex

# The lock holds a whole CUDA toolkit, which serves what is compiled at run time (flashinfer's kernels, for one). Its
# linker looks for lib64, for library names without a version, and for the driver's stub.
WORKDIR /opt/venv/lib/python3.12/site-packages/nvidia/cu13
RUN ln -s lib lib64 \
    && mkdir lib/stubs \
    && cp /usr/local/cuda/lib64/stubs/libcuda.so lib/stubs/ \
    && for library in lib/lib*.so.*; do ln -sf "${library##*/}" "${library%%.so.*}.so"; done


# ---------------------------------------------------------------------------------------------------------------------
FROM nvidia/cuda:13.0.3-base-ubuntu24.04 AS gpu

ARG DEBIAN_FRONTEND=noninteractive
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV CUDA_HOME=/opt/venv/lib/python3.12/site-packages/nvidia/cu13
ENV PATH=/opt/venv/bin:$CUDA_HOME/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1

# Triton compiles its launchers with g++ and Python's headers at run time; NCCL talks to InfiniBand through libibverbs.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates g++ ibverbs-providers libibverbs1 libnuma1 python3.12 python3.12-dev \
    && rm -rf /var/lib/apt/lists/*

COPY --from=build /opt/venv /opt/venv

# Fails here rather than in the first step of a run, if kernels cannot be compiled and linked.
RUN echo '__global__ void nothing() {}' > /tmp/nothing.cu \
    && "$CUDA_HOME/bin/nvcc" -shared --compiler-options=-fPIC -o /tmp/nothing.so /tmp/nothing.cu \
        -L"$CUDA_HOME/lib64" -L"$CUDA_HOME/lib64/stubs" -lcudart -lcuda -lnvrtc -lcublas \
    && rm /tmp/nothing.*

WORKDIR /opt/rlmath
COPY . .
RUN chmod -R a+rX . \
    && pip install --no-deps --no-build-isolation --editable . \
    && mkdir -m 1777 outputs \
    && useradd --uid 10001 --no-create-home --home-dir /tmp rlmath

USER 10001:10001
ENV HOME=/tmp \
    LOGNAME=rlmath
CMD ["python", "launch/train_grpo.py", "--help"]
