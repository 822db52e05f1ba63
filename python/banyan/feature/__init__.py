"""Features: named changes of a run, each with a life cycle, and the operator slots that they act on.

    from banyan import feature

    class MySwiglu(feature.Feature):
        def register_patches(self, slots, args):
            slots.replace("swiglu", forward)

    feature.register(MySwiglu())

`banyan.feature.modules=[FILE.py]` loads such a file; docs/guides/features.md says the rest.
"""

from banyan.errors import UserError
from banyan.feature.arguments import Arguments
from banyan.feature.base import Feature
from banyan.feature.registry import Registry, register, registered, unregister
from banyan.feature.slots import Op, Slots, ancestor_mask, applied

__all__ = [
    "Arguments",
    "Feature",
    "Op",
    "Registry",
    "Slots",
    "UserError",
    "ancestor_mask",
    "applied",
    "register",
    "registered",
    "unregister",
]
