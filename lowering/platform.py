"""What graphs are lowered for: the chip, the release of CANN and the operator packages that a deployment runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..graphs.errors import SpecError

CANN_RELEASES = ("8.3", "8.5", "9.0", "9.1")
"""Releases of CANN that a build can be for, oldest first; each takes what older ones take."""

ONLINE, PREBUILT = KERNELS = ("online", "prebuilt")
"""Where GE takes kernels from: it compiles each, or takes CANN's own where there is one."""

OPERATOR_PACKAGES = ("sgl-kernel-npu", "vllm-ascend")
"""Packages with operators beside CANN's own that lowerings know."""


@dataclass(frozen=True)
class Platform:
    """What graphs are lowered for; the default is this machine's CPU.

    Attributes:
        chip: name of the NPU in CANN's operator definitions, "ascend910_93" (Atlas A3) or "ascend910b" (Atlas A2); "" for
            CPUs.
        cann: release of CANN, one of `CANN_RELEASES`; "" for CPUs.
        packages: operator packages that are installed where the artifact runs, in alphabetical order.
        kernels: one of `KERNELS`; "" leaves it to torchair, whose graphs are compiled online.
        serial: operators of a graph run one after the other; else exchanges of experts have a stream beside that of products.
        prefetch: weights of the next products are fetched into the cache while links carry messages.
    """

    chip: str = ""
    cann: str = ""
    packages: tuple[str, ...] = ()
    kernels: str = ""
    serial: bool = False
    prefetch: bool = False

    def __post_init__(self) -> None:
        if self.cann and self.cann not in CANN_RELEASES:
            raise SpecError(f"CANN release {self.cann!r} is not known; legal are {', '.join(CANN_RELEASES)}")
        if unknown := sorted(set(self.packages) - set(OPERATOR_PACKAGES)):
            raise SpecError(f"operator packages {', '.join(unknown)} are not known; legal are {', '.join(OPERATOR_PACKAGES)}")
        if self.kernels and self.kernels not in KERNELS:
            raise SpecError(f"kernels are {self.kernels!r}; legal are {', '.join(KERNELS)}")
        if list(self.packages) != sorted(set(self.packages)):
            raise SpecError(f"operator packages are {self.packages}; legal is each once, in alphabetical order")

    def features(self, backend: str) -> frozenset[str]:
        """What a lowering may ask for: the backend's name, the chip, `cann>=` of each release up to this one, the packages and the kind of
        kernels."""
        releases = CANN_RELEASES[: CANN_RELEASES.index(self.cann) + 1] if self.cann else ()
        return frozenset(
            {
                backend,
                *filter(None, (self.chip,)),
                *(f"cann>={release}" for release in releases),
                *self.packages,
                *filter(None, (self.kernels,)),
            }
        )

    def as_dict(self) -> dict[str, Any]:
        """The fields as a manifest has them: without those that say nothing beyond what older builds had."""
        return {name: value for name, value in asdict(self).items() if value or name not in ("kernels", "serial", "prefetch")}

    @staticmethod
    def of(fields: Mapping[str, Any]) -> Platform:
        """The platform that a manifest names (`Manifest.platform`); the CPU where it names none."""
        return Platform(**{**fields, "packages": tuple(fields["packages"])}) if fields else CPU


CPU = Platform()
