"""The old name of `conversion.plan_conversion` and of its module, for one release: a module that can be called."""

import sys
import warnings
from types import ModuleType
from typing import Any

from . import conversion_plan, planning

NEW_NAMES = {
    "Plan": conversion_plan.ConversionPlan,
    "plan_to_ours": planning.plan_to_vanilla,
    "plan_to_theirs": planning.plan_to_source,
}


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> conversion_plan.ConversionPlan:
        warn("plan", "plan_conversion")
        return planning.plan_conversion(*args, **kwargs)


def __getattr__(name: str) -> Any:
    if name not in NEW_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = NEW_NAMES[name]
    warn(f"plan.{name}", f"{new.__module__.rpartition('.')[2]}.{new.__name__}")
    return new


def warn(old: str, new: str) -> None:
    warnings.warn(f"conversion.{old} is now conversion.{new}", DeprecationWarning, stacklevel=3)


sys.modules[__name__].__class__ = _CallableModule
