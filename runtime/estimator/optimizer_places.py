"""Decides which part of a rank's optimizer states is on the device, on the host and on NVMe.

Below stage 3 all of it is in one place. In stage 3 DeepSpeed places whole sub-groups.

Source: DeepSpeed 0.19.8, runtime/zero/stage3.py (_create_fp32_partitions) and runtime/swap_tensor/.
"""

from __future__ import annotations

from dataclasses import dataclass

from .ds_options import DsOptions

# Smaller tensors are not written to NVMe (swap_tensor/utils.py).
_MIN_NVME_BYTES = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSizes:
    """Numbers of elements before and after ZeRO's partitioning.

    Attributes:
        part: One rank's part, padding included.
        whole: All parameters before partitioning.
        width: Bytes of one element.
        sub_groups: In stage 3 the parts of the parameters of each sub-group, which the optimizer
            updates one by one.
    """

    part: int
    whole: int
    width: int
    sub_groups: tuple[tuple[int, ...], ...] = ()

    @property
    def ranks(self) -> int:
        """The number of ranks over which ZeRO partitions."""
        return max(1, round(self.whole / self.part)) if self.part else 1

    @property
    def largest_sub_group(self) -> int:
        """The elements of the largest sub-group."""
        return max((sum(parts) for parts in self.sub_groups), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPlaces:
    """Numbers of elements of one rank's optimizer states, by place.

    Attributes:
        unswapped: Of those on NVMe, the elements whose gradients are too small for it. Their
            gradients stay on the device until the step.
        host_sub_groups: In stage 3 the elements of each sub-group on the host.
    """

    device: int = 0
    host: int = 0
    nvme: int = 0
    unswapped: int = 0
    host_sub_groups: tuple[int, ...] = ()


def optimizer_places(options: DsOptions, sizes: PartitionSizes) -> OptimizerPlaces:
    """Return where the optimizer states of one rank are."""
    if not options.offloads_optimizer:
        return OptimizerPlaces(device=sizes.part)
    if options.stage < 3:
        return OptimizerPlaces(host=sizes.part)
    master = master_copy_width(options, sizes.width)
    num_on_device = int((1 - options.offload_optimizer_ratio) * len(sizes.sub_groups))
    device = nvme = unswapped = 0
    host: list[int] = []
    for number, parts in enumerate(sizes.sub_groups):
        numel = sum(parts)
        if options.offload_optimizer == "nvme" and numel * master >= _MIN_NVME_BYTES:
            nvme += numel
            unswapped += sum(part for part in parts if part * master < _MIN_NVME_BYTES)
        elif number < num_on_device:
            device += numel
        else:
            host.append(numel)
    return OptimizerPlaces(
        device=device,
        host=sum(host),
        nvme=nvme,
        unswapped=unswapped,
        host_sub_groups=tuple(host),
    )


def master_copy_width(options: DsOptions, width: int) -> int:
    """Return the bytes of one element of the optimizer's master copy, if it has one."""
    return width if options.low_precision_master else 4
