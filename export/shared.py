"""Modules of `vanilla_transformer` that need no torch, for the runtime: `shared.files` and others.

`import vanilla_transformer` imports torch where it is installed, to register the models. So these
modules are found in its folder and imported below this one. They import only each other.
"""

from importlib.util import find_spec

_spec = find_spec("vanilla_transformer")  # it is installed with this package
assert _spec is not None
__path__ = _spec.submodule_search_locations
