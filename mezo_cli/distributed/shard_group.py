"""What ranks exchange that each hold a part of the weights."""

from typing import TYPE_CHECKING

from mezo_cli.distributed.ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor


class ShardGroup:
    """The ranks of a run as the owners of parts of its weights.

    The methods raise `RankLost`, or the error that another rank has reported.

    Args:
        ranks: of the run; their process group is open.

    Attributes:
        rank: of this process, from 0.
        size: the number of ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.rank, self.size, self._ranks = ranks.rank, ranks.size, ranks

    def gather_(self, whole: "Tensor", purpose: str) -> None:
        """Fill `whole`, [size * n], of which this rank has written its own n elements, with those of the others.

        By broadcasts: with gloo, torch's own all-gather is slower and needs the memory of a second output.

        Args:
            whole: the tensor.
            purpose: `step` or `evaluation`, for `Ranks.exchanged`.
        """
        import torch.distributed as dist

        with self._ranks.exchanging():
            started = [dist.broadcast(part, rank, async_op=True) for rank, part in enumerate(whole.chunk(self.size))]
            for work in started:
                work.wait()
        self._ranks.exchanged[purpose] += whole.nbytes

    def sum_(self, values: "Tensor", purpose: str) -> None:
        """Replace integers by their sum over the ranks. `purpose`: as for `gather_`."""
        import torch.distributed as dist

        with self._ranks.exchanging():
            dist.all_reduce(values)
        self._ranks.exchanged[purpose] += self.size * values.nbytes

    def broadcast_(self, values: "Tensor", source: int) -> None:
        """Replace values by those of rank `source`."""
        import torch.distributed as dist

        with self._ranks.exchanging():
            dist.broadcast(values, source)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        import torch.distributed as dist

        with self._ranks.exchanging():
            dist.barrier()
