"""Collectives that move data from member to member: gathers, scatter, all-to-all, send, recv. Any dtype, any thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from byteps_py.errors import UsageError
from byteps_py.tensors import Op
from byteps_py.torch.collectives.dtypes import is_plain
from byteps_py.torch.collectives.group_collectives import GroupTransfer
from byteps_py.torch.collectives.work import Work
from byteps_py.torch.process_group.group_base import GroupBase, Tensors, assign, dense_tensors, only


def _is_flat(tensor: torch.Tensor) -> bool:
    """True if the tensor's bytes can be moved as they are in memory."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class TransferCollectives(GroupBase):
    """The collectives that move data. See torch.distributed.ProcessGroup for the methods."""

    # ---- gathers ---------------------------------------------------------------------------------------

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """Send each member's tensor to all members. Sizes may differ if all members know them."""
        outputs = dense_tensors(only(output_tensors, "all_gather"))
        tensor = only(dense_tensors(input_tensors), "all_gather")
        self._check_count("all_gather", outputs)
        pieces = [[output] for output in outputs]
        return self._record(
            self._collectives.move("all_gather", GroupTransfer.gather([tensor], pieces), self._timeout_s(opts))
        )

    def allgather_coalesced(self, output_lists: Any, input_list: Tensors, opts: Any = None) -> Work:
        """Send several tensors of each member to all members. output_lists: a list of outputs for each member."""
        inputs = dense_tensors(input_list)
        by_member = [dense_tensors(outputs) for outputs in output_lists]
        self._check_count("all_gather_coalesced", by_member)
        return self._record(
            self._collectives.move(
                "all_gather_coalesced", GroupTransfer.gather(inputs, by_member), self._timeout_s(opts)
            )
        )

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Concatenate the tensors of all members on all members."""
        fits = output.dtype is input.dtype and output.nbytes == input.nbytes * self._members.count
        if fits and is_plain(output) and is_plain(input):
            what = "all_gather_into_tensor"
            return self._record(self._collectives.move_evenly(Op.GATHER, what, input, output, self._timeout_s(opts)))
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Concatenate several tensors of all members on all members."""
        targets, sources = dense_tensors(outputs), dense_tensors(inputs)
        for output, input in zip(targets, sources, strict=True):
            if output.numel() != input.numel() * self.size() or output.dtype is not input.dtype:
                raise UsageError(
                    f"all_gather_into_tensor: an output of {output.dtype}{list(output.shape)} for {self.size()} ranks "
                    f"and an input of {input.dtype}{list(input.shape)}; the output must be {self.size()} times as large"
                )
        if len(targets) == 1 and _is_flat(targets[0]) and _is_flat(sources[0]):
            return self._record(
                self._collectives.move_evenly(
                    Op.GATHER, "all_gather_into_tensor", sources[0], targets[0], self._timeout_s(opts)
                )
            )
        plain = [output if output.is_contiguous() else torch.empty_like(output).contiguous() for output in targets]
        shares = [output.detach().view(-1).chunk(self.size()) for output in plain if output.numel()]
        pieces = [[share[member] for share in shares] for member in range(self.size())]

        def copy_to_outputs() -> None:
            for output, contiguous in zip(targets, plain, strict=True):
                if contiguous is not output:
                    assign(output, contiguous)

        nonempty = [tensor for tensor in sources if tensor.numel()]
        transfer = GroupTransfer.gather(nonempty, pieces, targets, copy_to_outputs)
        return self._record(self._collectives.move("all_gather_into_tensor", transfer, self._timeout_s(opts)))

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """Send each member's tensor to the root. Only the root passes outputs."""
        tensor = only(dense_tensors(input_tensors), "gather")
        root = self._root(opts)
        outputs = dense_tensors(only(output_tensors, "gather")) if self._members.position == root else []
        if self._members.position == root:
            self._check_count("gather", outputs)
        return self._record(self._collectives.gather_to(root, tensor, outputs, self._timeout_s(opts)))

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """Send a tensor from the root to each member. Only the root passes inputs."""
        output = only(dense_tensors(output_tensors), "scatter")
        root = self._root(opts)
        inputs = dense_tensors(only(input_tensors, "scatter")) if self._members.position == root else []
        if self._members.position == root:
            self._check_count("scatter", inputs)
        return self._record(self._collectives.scatter_from(root, inputs, output, self._timeout_s(opts)))

    # ---- all to all ------------------------------------------------------------------------------------

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> Work:
        """Send a tensor to each member, and receive one from each."""
        outputs, inputs = dense_tensors(output_tensors), dense_tensors(input_tensors)
        self._check_count("all_to_all", outputs)
        self._check_count("all_to_all", inputs)
        sends, receives = [[tensor] for tensor in inputs], [[tensor] for tensor in outputs]
        return self._record(
            self._collectives.move("all_to_all", GroupTransfer.exchange(sends, receives), self._timeout_s(opts))
        )

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Work:
        """Send rows to each member, and receive rows from each. By default the rows are divided evenly."""
        if not (is_plain(output) and is_plain(input)):
            dense_tensors([output, input])
        is_even = not input_split_sizes and not output_split_sizes and output.shape == input.shape and output.dim()
        if is_even and not output.shape[0] % self.size() and _is_flat(output) and _is_flat(input):
            return self._record(
                self._collectives.move_evenly(Op.EXCHANGE, "all_to_all_single", input, output, self._timeout_s(opts))
            )
        plain = output if output.is_contiguous() else torch.empty_like(output).contiguous()
        sends = self._rows(input, input_split_sizes)
        receives = self._rows(plain, output_split_sizes)
        finish = None if plain is output else lambda: assign(output, plain)
        transfer = GroupTransfer.exchange(sends, receives, [output], finish)
        return self._record(self._collectives.move("all_to_all_single", transfer, self._timeout_s(opts)))

    def _root(self, opts: Any) -> int:
        root: int = opts.rootRank if opts is not None else 0
        self._members.check_root(root)
        return root

    def _rows(self, tensor: torch.Tensor, sizes: Sequence[int] | None) -> list[list[torch.Tensor]]:
        rows = tensor.shape[0] if tensor.dim() else 0
        if not sizes:
            if rows % self.size():
                raise UsageError(
                    f"all_to_all_single: {rows} rows can't be split evenly among {self.size()} ranks; give split sizes"
                )
            sizes = [rows // self.size()] * self.size()
        if len(sizes) != self.size() or sum(sizes) != rows:
            raise UsageError(f"all_to_all_single: split sizes {list(sizes)} for {self.size()} ranks and {rows} rows")
        return [[piece] for piece in tensor.detach().split(list(sizes))]

    # ---- two members -----------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Work:
        """Send to the member at ``dst``. Done as soon as the tensor is copied."""
        return self._record(self._collectives.point_to_point.send(only(dense_tensors(tensors), "send"), dst, tag))

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Work:
        """Receive the next message with this tag from the member at ``src``."""
        return self._record(self._collectives.point_to_point.receive(only(dense_tensors(tensors), "recv"), src, tag))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Receive the first message with this tag from any member."""
        return self._record(
            self._collectives.point_to_point.receive_from_anybody(only(dense_tensors(tensors), "recv"), tag)
        )
