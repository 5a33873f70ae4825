"""Optimizers with fp32 states whose step on a device is done by torch operations, piece by piece."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from offloadzero.arithmetic.torch_steps import FP32_SCRATCH_BYTES, Fp32Piece, fp32_pieces
from offloadzero.core.segments import SegmentKind
from offloadzero.native.hyper import StepScalars
from offloadzero.update.spec import Buffers, H, OptimizerSpec, UpdateForm, piece_scratch_bytes


class Fp32Spec(OptimizerSpec[H]):
    """Base of such specs, which add the hyperparameters, the states, the kernel, and the operations on a piece."""

    scratch_bytes_per_element = FP32_SCRATCH_BYTES

    @abstractmethod
    def scalars(self, hyper: H, *, step: int, grad_scale: float) -> StepScalars:
        """Return the fp32 scalars of a step, which counts from 1."""

    @abstractmethod
    def native_step(
        self, buffers: Buffers, *, hyper: H, step: int, grad_scale: float, num_threads: int | None
    ) -> None:
        """Do one step in place by the kernels of csrc/cpu_adam."""

    @abstractmethod
    def torch_step(self, piece: Fp32Piece, scalars: StepScalars) -> None:
        """Do one step of a piece: the kernel's operations, one by one."""

    def step(
        self,
        buffers: Buffers,
        *,
        hyper: H,
        step: int,
        grad_scale: float,
        num_threads: int | None = None,
        form: UpdateForm = UpdateForm.NATIVE,
        scratch: Tensor | None = None,
    ) -> None:
        """Do one step in place on flat tensors of one memory."""
        if form is UpdateForm.TRITON:
            raise AssertionError(f"{self.name} has no fused kernel")
        if form is UpdateForm.NATIVE:
            self.native_step(buffers, hyper=hyper, step=step, grad_scale=grad_scale, num_threads=num_threads)
            return
        param = buffers[SegmentKind.PARAM]
        if scratch is None:
            num_bytes = piece_scratch_bytes(param.numel(), self.scratch_bytes_per_element)
            scratch = torch.empty(num_bytes, dtype=torch.uint8, device=param.device)
        scalars = self.scalars(hyper, step=step, grad_scale=grad_scale)
        for piece in fp32_pieces(
            param,
            buffers[SegmentKind.GRAD],
            [buffers[kind] for kind in self.states],
            master=buffers.get(SegmentKind.MASTER),
            scratch=scratch,
        ):
            self.torch_step(piece, scalars)
