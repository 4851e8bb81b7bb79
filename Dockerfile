# GPU nodes: CUDA 13, Python 3.12, the versions of requirements/gpu.txt.
#
#   docker build -t rlmath .                                     # without apex
#   docker build -t rlmath --build-arg WITH_APEX=1 .             # with NVIDIA's apex
#   docker run --gpus all --ipc=host -v /data:/data rlmath torchrun --nproc-per-node=8 launch/train_grpo.py --config ...
#
# First version: it has not been built yet.

FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04

# The GPUs to compile for. 9.0 is H100, H200 and H800; 10.0 is B200. Fewer compile faster.
ARG CUDA_ARCHS="9.0;10.0"
# Compilers at a time; each takes some GB of memory.
ARG MAX_JOBS=8
ARG WITH_APEX=0
ARG APEX_COMMIT=6424da3b4faa6c8f062da4a48c424fff3f02d42d
# Who runs in the container; give the ids of the owner of the mounted folders.
ARG USER_ID=1000
ARG GROUP_ID=1000

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    PATH=/opt/venv/bin:$PATH

# numactl and the RDMA libraries are for NCCL between nodes; the compiler and python3-dev also serve Triton at run time.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        build-essential ca-certificates git libibverbs1 ibverbs-providers librdmacm1 libnuma1 numactl \
        python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3.12 -m venv /opt/venv

# The lock, but for the one package that compiles against the torch installed here.
COPY requirements/gpu.txt /tmp/gpu.txt
RUN grep -v '^transformer-engine-torch==' /tmp/gpu.txt > /tmp/wheels.txt \
    && pip install --no-deps -r /tmp/wheels.txt

# The torch part of Transformer Engine, from source, against the cuDNN and NCCL that torch itself brings.
RUN site="$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
    && export CUDNN_PATH="$site/nvidia/cudnn" CUDNN_HOME="$site/nvidia/cudnn" \
    && export CPLUS_INCLUDE_PATH="$site/nvidia/cudnn/include:$site/nvidia/nccl/include" \
    && export NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE TORCH_CUDA_ARCH_LIST="$CUDA_ARCHS" \
    && grep '^transformer-engine-torch==' /tmp/gpu.txt > /tmp/source.txt \
    && MAX_JOBS="$MAX_JOBS" pip install --no-deps --no-build-isolation -r /tmp/source.txt

# apex only from NVIDIA's repository: the package of that name on the package index is something else.
RUN if [ "$WITH_APEX" = 1 ]; then \
        git init -q /tmp/apex \
        && git -C /tmp/apex fetch -q --depth 1 https://github.com/NVIDIA/apex "$APEX_COMMIT" \
        && git -C /tmp/apex checkout -q FETCH_HEAD \
        && TORCH_CUDA_ARCH_LIST="$CUDA_ARCHS" APEX_PARALLEL_BUILD="$MAX_JOBS" APEX_CPP_EXT=1 APEX_CUDA_EXT=1 \
            pip install --no-deps --no-build-isolation /tmp/apex \
        && rm -rf /tmp/apex; \
    fi

WORKDIR /opt/rlmath
COPY . .
RUN pip install --no-deps --no-build-isolation --editable .

# A user of one's own; Ubuntu's image already has one with id 1000.
RUN if id ubuntu >/dev/null 2>&1; then userdel --remove ubuntu; fi \
    && groupadd --gid "$GROUP_ID" rlmath \
    && useradd --create-home --uid "$USER_ID" --gid "$GROUP_ID" rlmath \
    && chown -R rlmath:rlmath /opt/rlmath
USER $USER_ID

CMD ["python", "launch/train_grpo.py", "--help"]
