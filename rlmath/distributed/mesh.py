"""The training layout and the engines' layout over the same ranks, as plain arithmetic.

Ranks are laid out as Megatron does by default, tensor fastest, then context, then data, then
pipeline. With 8 ranks, tensor 2 and pipeline 2, rank 5 is tensor rank 1 of data rank 0 in pipeline
stage 1.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """The layout of a run as one rank sees it.

    Sizes must divide: `planning.parallelism` has checked it."""

    rank: int
    world_size: int
    tensor: int
    pipeline: int
    engine_size: int
    """Ranks of one rollout engine (its tensor-parallel size)."""
    virtual_pipeline: int = 1
    """Model chunks of one pipeline stage.

    Above 1 the stages take turns (Megatron's interleaved schedule)."""
    context: int = 1
    """Ranks that share the tokens of every pack."""
    expert: int = 1
    """Ranks of one pipeline stage that share a layer's experts; 1 where there are none."""
    expert_tensor: int = 1
    """Ranks that share the matrices of every expert."""
    engine_ranks: int = 0
    """Ranks that only engines have, after those of this mesh; 0: engines live in the mesh's."""

    @property
    def data(self) -> int:
        return self.world_size // (self.tensor * self.context * self.pipeline)

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor

    @property
    def context_rank(self) -> int:
        return self.rank // self.tensor % self.context

    @property
    def data_rank(self) -> int:
        return self.rank // (self.tensor * self.context) % self.data

    @property
    def pipeline_rank(self) -> int:
        return self.rank // (self.tensor * self.context * self.data)

    @property
    def expert_tensor_rank(self) -> int:
        return self.rank % self.expert_tensor

    @property
    def expert_rank(self) -> int:
        """Number of this rank's share of the experts.

        Within a stage, ranks go round over the shares: expert tensor fastest, then expert."""
        return self.rank // self.expert_tensor % self.expert

    @property
    def expert_data(self) -> int:
        """Ranks of a stage that have the same experts."""
        return self.world_size // (self.pipeline * self.expert * self.expert_tensor)

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline - 1

    @property
    def microbatch_multiple(self) -> int:
        """The number of micro-batches of a data-parallel rank must be a multiple of this.

        The interleaved schedule works on as many at a time as there are stages, and refuses a
        remainder."""
        return self.pipeline if self.virtual_pipeline > 1 else 1

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss counts in sums over all ranks.

        One rank of every data-parallel replica counts, so that every token counts once."""
        return self.is_last_stage and self.tensor_rank == 0 and self.context_rank == 0

    @property
    def num_engines(self) -> int:
        return (self.engine_ranks or self.world_size) // self.engine_size

    @property
    def engine_index(self) -> int:
        """Number of the engine that this rank is part of.

        A training rank is part of none if engines have ranks of their own."""
        assert not self.engine_ranks, (
            "a training rank beside engines on ranks of their own is part of none"
        )
        return self.rank // self.engine_size

    @property
    def is_engine_leader(self) -> bool:
        """Whether this rank scores and reports what its engine sampled.

        One rank of every engine does; a training rank does not if engines have ranks of their
        own."""
        return not self.engine_ranks and self.rank % self.engine_size == 0

    def describe(self) -> str:
        """The layout for people, such as "TP2 x PP1 x DP1, 2 engines of TP1".

        It may end with "on ranks of their own", and is at most "TP2 x CP2 x PP2 x VPP2 x DP1 x EP2
        x ETP2, ..."."""
        engines = f"{self.num_engines} engine{'s' if self.num_engines > 1 else ''}"
        place = " on ranks of their own" if self.engine_ranks else ""
        return f"{self.training_layout}, {engines} of TP{self.engine_size}{place}"

    @property
    def training_layout(self) -> str:
        """`describe` without engines."""
        context = f" x CP{self.context}" if self.context > 1 else ""
        chunks = f" x VPP{self.virtual_pipeline}" if self.virtual_pipeline > 1 else ""
        experts = f" x EP{self.expert}" if self.expert > 1 else ""
        experts += f" x ETP{self.expert_tensor}" if self.expert_tensor > 1 else ""
        return f"TP{self.tensor}{context} x PP{self.pipeline}{chunks} x DP{self.data}{experts}"
