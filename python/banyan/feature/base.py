"""The base class of features: name, level, what it requires and excludes, and the hooks of its life cycle."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from banyan.errors import UserError

if TYPE_CHECKING:
    from banyan.feature.arguments import Arguments
    from banyan.feature.slots import Slots

_NAME = re.compile(r"^[a-z0-9][a-z0-9-]*$")


class Feature:
    """One feature. Override what it needs; every hook does nothing here.

    Order of the hooks, each over all needed features before the next begins: register_args (over all features), the
    checks of `requires` and `conflicts`, pre_validate, the configuration's own rules, post_validate, validate; and when
    the run starts pre_register_patches, register_patches. The slots change after each of the last two.
    """

    # Lower-case words with dashes; the class's name by default ("MySwiglu" is my-swiglu).
    name: ClassVar[str] = ""
    # 0: always on; 1, 2: on up to banyan.feature.optimization_level (2 by default).
    level: ClassVar[int] = 2
    # Names of features that must be on, or must not be.
    requires: ClassVar[tuple[str, ...]] = ()
    conflicts: ClassVar[tuple[str, ...]] = ()
    # One sentence for `banyan features`.
    text: ClassVar[str] = ""

    def feature_name(self) -> str:
        """The name under which the registry has it. Raises UserError for one that is no name."""
        words = self.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", type(self).__name__)
        name = words.lower().replace("_", "-")
        if not _NAME.match(name):
            raise UserError(
                f"feature {words!r}: wanted a name of lower-case letters, digits and dashes"
            )
        return name

    def is_enabled(self, args: Arguments) -> bool:
        """Whether the configuration asks for it: unless an argument of its name says otherwise."""
        return bool(args.get(self.feature_name().replace("-", "_"), True))

    def is_need_apply(self, args: Arguments) -> bool:
        """Whether its hooks run: level 0, or enabled and within the optimization level."""
        return self.level == 0 or (self.level <= args.optimization_level and self.is_enabled(args))

    def register_args(self, args: Arguments) -> None:
        """Adds arguments of its own: `args.add("my_scale", float, 1.0)`."""

    def pre_validate(self, args: Arguments) -> None:
        """Before the rules of the configuration: may set values aside that they would refuse."""

    def post_validate(self, args: Arguments) -> None:
        """After them; runs before every validate, as in MindSpeed."""

    def validate(self, args: Arguments) -> None:
        """Checks of its own: raises UserError."""

    def pre_register_patches(self, slots: Slots, args: Arguments) -> None:
        """What must be in place before other features register."""

    def register_patches(self, slots: Slots, args: Arguments) -> None:
        """Registers replacements and wrappers."""

    def incompatible_check(self, args: Arguments, other: str, is_on: bool) -> None:
        """Called for each of `conflicts`. Raises UserError if both are on."""
        if is_on:
            raise UserError(f"features {self.feature_name()} and {other} are incompatible")

    def dependency_check(self, args: Arguments, other: str, is_on: bool) -> None:
        """Called for each of `requires`. Raises UserError if the other is off."""
        if not is_on:
            raise UserError(f"feature {self.feature_name()} requires {other}, which is off")
