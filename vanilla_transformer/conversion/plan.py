"""The old name of `planning` and `conversion_plan`, for one release.

`vanilla_transformer.conversion.plan` was a function and a module at once, so this module can be called.
"""

import sys
import warnings
from types import ModuleType

from . import conversion_plan, planning

NEW_NAMES = {
    "Plan": conversion_plan.ConversionPlan,
    "Step": conversion_plan.TensorStep,
    "plan_to_ours": planning.plan_to_vanilla,
    "plan_to_theirs": planning.plan_to_source,
}


def warn(old, new):
    warnings.warn(f"conversion.{old} is now conversion.{new}", DeprecationWarning, stacklevel=3)


def __getattr__(name):
    if name not in NEW_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = NEW_NAMES[name]
    warn(f"plan.{name}", f"{new.__module__.rpartition('.')[2]}.{new.__name__}")
    return new


class _CallableModule(ModuleType):
    def __call__(self, source, to=None):
        warn("plan", "plan_conversion")
        return planning.plan_conversion(source, to)


sys.modules[__name__].__class__ = _CallableModule
