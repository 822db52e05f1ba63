"""The registry: which features there are, and the order in which their hooks run.

Phases: arguments -> requires and conflicts of all -> pre_validate -> the configuration's own rules -> post_validate ->
validate; at the start of the run pre_register_patches -> apply -> register_patches -> apply. Each phase ends for all
features before the next begins. `stop` takes out what the features registered.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from banyan.errors import UserError
from banyan.feature.arguments import Arguments
from banyan.feature.base import Feature
from banyan.feature.slots import Slots

_process: dict[str, Feature] = {}  # registered outside a file that a configuration loads
_collecting: list[dict[str, Feature]] = []


def register(feature: Feature | type[Feature]) -> Feature:
    """Adds a feature to the runs of this process, or of the configuration that loads the file.

    Raises:
        UserError: It is no feature, or there is one of that name.
    """
    made = feature() if isinstance(feature, type) and issubclass(feature, Feature) else feature
    if not isinstance(made, Feature):
        raise UserError(
            f"banyan.feature.register: wanted a banyan.feature.Feature, got {feature!r}"
        )
    _add(_collecting[-1] if _collecting else _process, made)
    return made


def unregister(name: str) -> None:
    """Takes a feature out of the later runs of this process. Raises UserError for an unknown name."""
    if name not in _process:
        raise UserError(f"banyan.feature.unregister: {_unknown(name, _process)}")
    del _process[name]


def registered() -> list[Feature]:
    """Features of this process, in the order of registration."""
    return list(_process.values())


@contextmanager
def collecting() -> Iterator[dict[str, Feature]]:
    """What is registered inside goes to the dict, not to the process."""
    _collecting.append({})
    try:
        yield _collecting[-1]
    finally:
        _collecting.pop()


class Registry:
    """The features of one run, in order."""

    def __init__(
        self,
        features: Iterable[Feature],
        values: MutableMapping[str, Any],
        given: Mapping[str, Any] | None = None,
        others: Mapping[str, bool] | None = None,
    ) -> None:
        """`values` and `given` as of Arguments; `others` are features without hooks: name -> whether it is on."""
        self.features: dict[str, Feature] = {}
        for feature in features:
            _add(self.features, feature, others or {})
        self.args = Arguments(values, given)
        self.sources: dict[str, str] = {}  # digests of the files that they came from
        self._others = dict(others or {})
        self._core: Any = None

    def needed(self) -> list[Feature]:
        """Features whose hooks run."""
        return [f for f in self.features.values() if f.is_need_apply(self.args)]

    def is_on(self, name: str) -> bool:
        """Whether a feature is on. Raises UserError for an unknown name."""
        if name in self.features:
            return self.features[name].is_need_apply(self.args)
        if name in self._others:
            return self._others[name]
        raise UserError(_unknown(name, [*self.features, *self._others]))

    def prepare(self, core_rules: Callable[[], None] = lambda: None) -> None:
        """From the arguments to validate. Raises UserError for the first rule that is broken."""
        self._each(self.features.values(), "register_args", self.args)
        self.args.check()
        needed = self.needed()
        self._check_relations(needed)
        self._each(needed, "pre_validate", self.args)
        core_rules()
        self._each(needed, "post_validate", self.args)
        self._each(needed, "validate", self.args)

    def start(self, core: Any) -> list[str]:
        """Registers the patches of the needed features and puts them into force.

        Args:
            core: `banyan._C`.

        Returns:
            A line per slot that is changed.
        """
        self._core = core
        try:
            for hook in ("pre_register_patches", "register_patches"):
                for feature in self.needed():
                    name = feature.feature_name()
                    self.args.speak_for(name)
                    getattr(feature, hook)(Slots(name, core), self.args)
                core.slots.apply()
        except BaseException:
            self.stop()
            raise
        return core.slots.dump()

    def stop(self) -> None:
        """Takes out what the features registered; the slots are as if they had never been."""
        if self._core is None:
            return
        for name in self.features:
            self._core.slots.remove(name)
        self._core.slots.apply()

    def repatch(self, overrides: Mapping[str, Any]) -> list[str]:
        """Registers all patches anew under other values (verl calls MindSpeed's so, with its overrides)."""
        if self._core is None:
            raise UserError("feature: wanted a registry that was started before repatch")
        core = self._core
        self.stop()
        self.args.overlay(overrides)
        return self.start(core)

    def _check_relations(self, needed: list[Feature]) -> None:
        for feature in needed:
            for other in feature.conflicts:
                feature.incompatible_check(self.args, other, self.is_on(other))
        for feature in needed:
            for other in feature.requires:
                feature.dependency_check(self.args, other, self.is_on(other))

    def _each(self, features: Iterable[Feature], hook: str, *arguments: Any) -> None:
        for feature in features:
            self.args.speak_for(feature.feature_name())
            getattr(feature, hook)(*arguments)


def _add(
    features: dict[str, Feature], feature: Feature, others: Mapping[str, bool] | None = None
) -> None:
    name = feature.feature_name()
    if name in features or name in (others or {}):
        raise UserError(f"feature {name}: wanted a name of its own; there is one of that name")
    if feature.level not in (0, 1, 2):
        raise UserError(f"feature {name}: level: wanted 0, 1 or 2, got {feature.level}")
    features[name] = feature


def _unknown(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; the nearest is {near[0]}" if near else "; `banyan features` lists them"
    return f"feature: wanted the name of a feature, got '{name}'{hint}"
