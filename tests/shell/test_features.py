"""Features: the table and the keys that it reads, the life cycle and its order, what a wrong feature is told.

The core is a stand-in here; tests/parity/test_feature_slots.py has the real one.
"""

from __future__ import annotations

import json
import re

import pytest
from banyan.cli.main import main
from banyan.config import features, schema, table
from banyan.config.resolve import resolve
from banyan.errors import RunError, UserError
from banyan.feature.registry import Registry
from shell_files import ROOT
from test_config import BASE

from banyan import feature
from banyan.feature import loading

SPEC = ROOT.parent / "shared" / "specs" / "features.md"
O = "actor_rollout_ref.actor.megatron.override_transformer_config"  # noqa: E741  the letter of the documents


def resolved(*argv: str, **kwargs):
    return resolve([*BASE, *argv], "ppo_megatron_trainer", environ={}, **kwargs)


def error_of(call) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- the table ---


def test_every_row_is_whole_and_names_what_exists():
    rows = features.rows()
    assert len(rows) > 85
    for row in rows.values():
        assert row.level in (0, 1, 2)
        assert row.written in ("always", "refused", "key"), row.name
        assert row.state() in features.STATES
        assert len(row.text) > 10, row.name
        assert row.switches or row.written == "always", row.name
        assert all(switch.default is not None for switch in row.switches) or row.written == "key"
        for other in (*row.conflicts, *row.requires):
            assert other in rows, (row.name, other)


def test_a_switch_has_one_home():
    seen: dict[str, str] = {}
    for row in features.rows().values():
        for switch in row.switches:
            assert switch.key not in seen, (switch.key, row.name, seen.get(switch.key))
            seen[switch.key] = row.name
            elsewhere = switch.key in schema.honoured() or (
                table.entries()[switch.key].file != features.FILE
            )
            assert elsewhere == (switch.default is None), switch.key


@pytest.mark.skipif(not SPEC.is_file(), reason="features.md is not at hand (../shared/specs)")
def test_every_feature_of_the_specification_is_in_the_table():
    text = SPEC.read_text(encoding="utf-8").split("## 5.")[1].split("Later branches")[0]
    lines = [line for line in text.splitlines() if line.startswith("- ") and " — " in line]
    named = set()
    for line in lines:
        named |= set(re.findall(r"`([a-z0-9-]+)`", line.split(" — ")[1]))
    named |= {
        re.split(r"[/°]", line.removeprefix("- ").split(" — ")[0])[-1].replace("_", "-")
        for line in lines
        if "same name" in line
    }
    known = set(features.on({}))
    assert len(named) > 65
    assert sorted(named - known) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [("use_fused_swiglu", "true"), ("use_flash_attn", "true"), ("recompute_norm", "true")],
)
def test_a_switch_of_what_is_always_on_is_said_once(key, value):
    notes = [note for note in resolved(f"+{O}.{key}={value}").notes if key in note]
    assert len(notes) == 1
    assert "equivalent" in notes[0]


def test_a_refused_feature_says_why_and_takes_its_default():
    text = error_of(lambda: resolved(f"+{O}.swap_attention=true"))
    assert text.startswith(f"{O}.swap_attention: wanted false, got true: moves activations to host")
    resolved(f"+{O}.swap_attention=false", f"+{O}.schedules_method=null")
    assert "wanted null, got dualpipev" in error_of(
        lambda: resolved(f"+{O}.schedules_method=dualpipev")
    )


def test_an_unknown_switch_gets_the_nearest_name():
    text = error_of(lambda: resolved(f"+{O}.use_fused_rotary_pos_embd=true"))
    assert text.endswith(f"the nearest known key is {O}.use_fused_rotary_pos_emb")


def test_a_switch_that_stands_in_the_yaml_turns_its_feature_on():
    off = resolved().switches
    on = resolved(f"{O}.recompute_granularity=full", f"{O}.recompute_method=uniform").switches
    rows = features.rows()
    assert rows["recompute-granularity"].state() == "switch"
    assert not rows["recompute-granularity"].is_on(off)
    assert rows["recompute-granularity"].is_on(on)
    assert rows["use-swiglu"].is_on(off)
    assert not rows["swap-attention"].is_on(on)
    assert features.on(on)["recompute-num-layers"]  # by the name of a switch


def test_sizes_of_one_turn_nothing_on():
    assert not features._is_off("k", 2)
    for value in (1, None, False, 0, "", "none"):
        assert features._is_off("k", value), value
    assert not features._is_off("k", True)


def test_config_explain_knows_switches(capsys):
    assert main(["config", "explain", f"{O}.moe_fb_overlap"]) == 0
    out = capsys.readouterr().out
    assert "switch of the feature moe-fb-overlap" in out
    assert "config/feature_table.tsv" in out


# --- `banyan features` ---


def listed(capsys, *argv: str) -> dict[str, dict]:
    assert main(["features", "--json", *argv]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_the_list_as_json(capsys):
    rows = listed(capsys)
    assert list(rows) == list(features.rows())
    assert rows["use-swiglu"]["on"] is True
    assert rows["moe-fb-overlap"]["state"] == "refused"
    assert "swap-attention" in rows["moe-fb-overlap"]["conflicts"]
    assert rows["recompute-granularity"]["switches"][f"{O}.recompute_granularity"] is None


def test_the_list_for_a_configuration(capsys):
    rows = listed(capsys, f"{O}.recompute_granularity=full")
    assert rows["recompute-granularity"]["on"] is True
    assert rows["recompute-granularity"]["switches"][f"{O}.recompute_granularity"] == "full"
    assert main(["features", f"+{O}.swap_attention=true"]) == 2
    assert "swap_attention: wanted false" in capsys.readouterr().err


def test_the_list_as_a_table(capsys):
    assert main(["features"]) == 0
    out = capsys.readouterr().out
    for name in features.rows():
        assert name in out


# --- the life cycle ---


class FakeSlots:
    """Owners in order, as the core has them; a line of `log` per call."""

    def __init__(self, log):
        self.log, self.owners = log, []

    def names(self):
        return ["swiglu"]

    def check(self, slot):
        if slot not in self.names():
            raise ValueError(f"[feature] slot: wanted one of swiglu, got '{slot}'")

    def replace(self, slot, owner, functions, force):
        self.owners.append(owner)

    def wrap(self, slot, owner, name, wrapper):
        self.owners.append(owner)
        self.wrapper = wrapper
        return True

    def remove(self, owner):
        count = self.owners.count(owner)
        self.owners = [other for other in self.owners if other != owner]
        return count

    def apply(self):
        self.log.append("apply")
        return True

    def dump(self):
        return [f"swiglu: {owner}" for owner in self.owners]


class FakeCore:
    def __init__(self, log=None):
        self.slots = FakeSlots(log if log is not None else [])


HOOKS = "register_args pre_validate post_validate validate pre_register_patches register_patches"


def recording(label: str, log: list, **attributes) -> feature.Feature:
    """A feature that notes the hooks that run."""

    def noting(hook):
        return lambda self, *arguments: log.append(f"{label}.{hook}")

    methods = {hook: noting(hook) for hook in HOOKS.split()}
    return type(label, (feature.Feature,), {"name": label, **methods, **attributes})()


def test_phases_run_in_the_documented_order():
    log: list[str] = []
    run = Registry([recording("a", log), recording("b", log)], {})
    run.prepare(lambda: log.append("rules"))
    run.start(FakeCore(log))
    assert log == [
        *("a.register_args", "b.register_args"),
        *("a.pre_validate", "b.pre_validate"),
        "rules",
        *("a.post_validate", "b.post_validate"),
        *("a.validate", "b.validate"),
        *("a.pre_register_patches", "b.pre_register_patches", "apply"),
        *("a.register_patches", "b.register_patches", "apply"),
    ]


def test_levels_and_switches_decide_who_runs():
    def needed(level, **values):
        features = [recording(f"level{n}", [], level=n) for n in (0, 1, 2)]
        features.append(recording("switched", [], register_args=lambda s, a: a.add("switched")))
        run = Registry(features, {"banyan.feature.optimization_level": level, **values}, values)
        run.prepare()
        return [f.name for f in run.needed()]

    assert needed(0) == ["level0"]
    assert needed(1) == ["level0", "level1"]
    assert needed(2) == ["level0", "level1", "level2"]
    assert needed(2, switched=True) == ["level0", "level1", "level2", "switched"]


def test_a_level_0_feature_cannot_be_switched_off():
    always = recording("always", [], level=0, register_args=lambda s, a: a.add("always"))
    run = Registry([always], {}, {"always": False})
    run.prepare()
    assert run.needed() == [always]


def test_conflicts_and_requirements_are_checked_before_any_hook():
    log: list[str] = []
    clash = [recording("a", log, conflicts=("b",)), recording("b", log)]
    text = error_of(lambda: Registry(clash, {}).prepare())
    assert text == "features a and b are incompatible"
    assert not any("validate" in line for line in log)
    alone = [
        recording("a", log, requires=("b",)),
        recording("b", log, is_enabled=lambda s, a: False),
    ]
    text = error_of(lambda: Registry(alone, {}).prepare())
    assert text == "feature a requires b, which is off"
    far = [recording("a", log, requires=("use-fused-swigloo",))]
    text = error_of(lambda: Registry(far, {}, {}, features.on({})).prepare())
    assert text.startswith(
        "feature: wanted the name of a feature, got 'use-fused-swigloo'; the nearest is"
    )
    table_one = [recording("a", log, conflicts=("use-flash-attn",))]
    text = error_of(lambda: Registry(table_one, {}, {}, features.on({})).prepare())
    assert text == "features a and use-flash-attn are incompatible"
    Registry(
        [recording("a", log, requires=("use-fused-swiglu",))], {}, {}, features.on({})
    ).prepare()


def test_names_are_unique_and_well_formed():
    assert "there is one of that name" in error_of(
        lambda: Registry([recording("a", []), recording("a", [])], {})
    )
    assert "there is one of that name" in error_of(
        lambda: Registry([recording("use-swiglu", [])], {}, {}, features.on({}))
    )
    assert "wanted a name of lower-case letters" in error_of(
        lambda: Registry([recording("no name", [])], {})
    )
    assert "level: wanted 0, 1 or 2, got 3" in error_of(
        lambda: Registry([recording("a", [], level=3)], {})
    )

    class MySwiglu2(feature.Feature):
        pass

    assert MySwiglu2().feature_name() == "my-swiglu2"
    assert recording("My_Name", []).feature_name() == "my-name"


def test_hooks_may_change_values_and_refuse():
    def park(self, args):
        args["trainer.save_freq"] = -1

    values = {"trainer.save_freq": 3}
    seen = []
    run = Registry([recording("a", [], pre_validate=park)], values)
    run.prepare(lambda: seen.append(values["trainer.save_freq"]))
    assert seen == [-1]

    def refuse(self, args):
        raise UserError("a: no")

    assert (
        error_of(lambda: Registry([recording("a", [], validate=refuse)], {}).prepare()) == "a: no"
    )


def test_stop_takes_everything_out_and_repatch_twice_is_once():
    def patches(self, slots, args):
        if args.scale > 1:
            slots.wrap("swiglu", lambda inner: inner, "w")

    scaled = recording(
        "a",
        [],
        register_args=lambda s, a: a.add("scale", float, 1.0),
        register_patches=patches,
    )
    core = FakeCore()
    run = Registry([scaled], {})
    assert "wanted a registry that was started" in error_of(lambda: run.repatch({}))
    run.prepare()
    assert run.start(core) == []
    assert run.repatch({"scale": 2}) == ["swiglu: a"]
    assert run.repatch({"scale": 2}) == ["swiglu: a"]
    assert run.args.scale == 2.0
    run.stop()
    assert core.slots.dump() == []


def test_a_hook_that_fails_leaves_no_patch():
    def patches(self, slots, args):
        slots.wrap("swiglu", lambda inner: inner, "w")
        raise UserError("no")

    core = FakeCore()
    run = Registry([recording("a", [], register_patches=patches)], {})
    run.prepare()
    with pytest.raises(UserError):
        run.start(core)
    assert core.slots.dump() == []


# --- arguments ---


def with_args(register, **given):
    run = Registry([recording("a", [], register_args=register)], {}, given)
    run.prepare()
    return run.args


def test_arguments_have_types_choices_and_nearest_names():
    def add(self, args):
        args.add("scale", float, 1.0, "what it is")
        args.add("kind", str, "one", choices=["one", "two"])
        args.add_choice("kind", "three")
        args.add_choice("kind", "three")

    args = with_args(add, scale=2, kind="three")
    assert (args.scale, args.kind, args["scale"], args.get("other", 7)) == (2.0, "three", 2.0, 7)
    assert args.describe("a")[0] == ("scale", 2.0, "what it is")
    assert error_of(lambda: with_args(add, scale="x")) == (
        "banyan.feature.args.scale: wanted a number, got x"
    )
    assert error_of(lambda: with_args(add, kind="four")) == (
        "banyan.feature.args.kind: wanted one of one, two, three, got four"
    )
    assert error_of(lambda: with_args(add, scael=1)) == (
        "banyan.feature.args.scael: wanted an argument of a loaded feature (scale, kind), got 'scael'; "
        "the nearest is scale"
    )
    assert "wanted a whole number, got True" in error_of(
        lambda: with_args(lambda s, a: a.add("n", int, 1), n=True)
    )


def test_two_features_cannot_add_one_argument():
    add = {"register_args": lambda s, a: a.add("scale", float, 1.0)}
    run = Registry([recording("a", [], **add), recording("b", [], **add)], {})
    assert error_of(run.prepare) == (
        "feature b: argument scale: wanted a name of its own, got one of feature a"
    )


# --- loading ---

MINE = """
from banyan import feature

class Mine(feature.Feature):
    "Counts nothing."
    level = 1

    def register_args(self, args):
        args.add("my_scale", float, 1.0)

    def validate(self, args):
        if args.my_scale <= 0:
            from banyan.errors import UserError
            raise UserError(f"my_scale: wanted > 0, got {args.my_scale}")

feature.register(Mine)
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


@pytest.mark.parametrize("key", [loading.MODULES_KEY, loading.EXTERNAL_KEYS[0]])
def test_a_configuration_loads_features(mine, key):
    config = resolved(f"{key}=[{mine}]", "banyan.feature.args.my_scale=2.5")
    assert [f.feature_name() for f in config.features.needed()] == ["mine"]
    assert config.features.args.my_scale == 2.5
    assert feature.registered() == []
    assert "my_scale: wanted > 0, got -1.0" in error_of(
        lambda: resolved(f"{key}={mine}", "banyan.feature.args.my_scale=-1")
    )


def test_ranks_must_have_the_same_files(mine):
    sources = resolved(f"banyan.feature.modules=[{mine}]").features.sources
    assert list(sources) == [str(mine)]
    mine.write_text(MINE + "\n# another line\n")
    assert resolved(f"banyan.feature.modules=[{mine}]").features.sources != sources
    assert resolved().features.sources == {}


def test_an_importable_module_serves_several_runs(mine, monkeypatch):
    monkeypatch.syspath_prepend(mine.parent)
    for _ in range(2):
        config = resolved("banyan.feature.modules=[mine]")
        assert len(config.features.needed()) == 1
    loading._of_module.clear()


def test_level_and_partial_resolution(mine):
    off = resolved(f"banyan.feature.modules=[{mine}]", "banyan.feature.optimization_level=0")
    assert off.features.needed() == []
    assert resolved(f"banyan.feature.modules=[{mine}]", partial=True).features is None


def test_users_features_are_listed(mine, capsys):
    rows = listed(capsys, f"banyan.feature.modules=[{mine}]", "banyan.feature.args.my_scale=2")
    assert rows["mine"]["here"] == "Counts nothing."
    assert rows["mine"]["on"] is True
    assert rows["mine"]["switches"] == {"banyan.feature.args.my_scale": 2.0}


def test_files_that_cannot_be_loaded_are_named(tmp_path):
    key = loading.MODULES_KEY
    assert error_of(lambda: resolved(f"{key}=[nowhere.py]")) == (
        f"{key}: wanted a Python file or module, got nowhere.py: no such file"
    )
    assert "nowhere_at_all cannot be imported: ModuleNotFoundError" in error_of(
        lambda: resolved(f"{key}=[nowhere_at_all]")
    )
    (tmp_path / "bad.py").write_text("x = 1\nraise KeyError('k')\n")
    assert "bad.py cannot be loaded: KeyError: 'k' (line 2)" in error_of(
        lambda: resolved(f"{key}=[{tmp_path}/bad.py]")
    )
    (tmp_path / "wrong.py").write_text("from banyan import feature\nfeature.register(3)\n")
    assert "wanted a banyan.feature.Feature, got 3 (line 2)" in error_of(
        lambda: resolved(f"{key}=[{tmp_path}/wrong.py]")
    )
    assert "wanted an argument of a loaded feature (none), got 'x'" in error_of(
        lambda: resolved("banyan.feature.args.x=1")
    )


def test_features_of_the_process(mine):
    class Here(feature.Feature):
        pass

    feature.register(Here)
    try:
        assert "there is one of that name" in error_of(lambda: feature.register(Here))
        config = resolved(f"banyan.feature.modules=[{mine}]")
        assert [f.feature_name() for f in config.features.needed()] == ["here", "mine"]
    finally:
        feature.unregister("here")
    assert "got 'here'" in error_of(lambda: feature.unregister("here"))


def test_in_force_says_what_changed_and_ends_with_the_block():
    def patches(self, slots, args):
        slots.wrap("swiglu", lambda inner: inner, "w")

    run = Registry([recording("a", [], register_patches=patches)], {})
    run.prepare()
    core, said = FakeCore(), []
    with loading.in_force(run, core, [], said.append):
        assert core.slots.owners == ["a"]
    assert core.slots.owners == []
    assert said == ["slot swiglu: a (the rollout runs op by op, not in one native pass)"]
    text = error_of(lambda: loading.in_force(run, core, ["http://x"], said.append).__enter__())
    assert text.startswith("actor_rollout_ref.rollout.server_urls: wanted none with changed slots")
    assert core.slots.owners == []
    with loading.in_force(None, core, ["http://x"], said.append):
        pass


# --- what a function must be ---


def test_functions_of_a_replacement_are_checked():
    slots = feature.Slots("mine", FakeCore())
    assert "wanted one of swiglu, got 'swigloo'" in error_of(
        lambda: slots.replace("swigloo", lambda gate_up: gate_up)
    )
    assert error_of(lambda: slots.replace("swiglu", lambda gate, up: gate)) == (
        "feature mine: swiglu: forward wants gate, up; known arguments are gate_up"
    )
    assert error_of(lambda: slots.replace("swiglu", len, extra=len)) == (
        "feature mine: swiglu: wanted functions forward, backward, got extra"
    )
    core = FakeCore()
    core.slots.names = lambda: ["rope", "linear", "adamw"]
    slots = feature.Slots("mine", core)
    assert "rope: wanted backward beside forward: autograd has no x there" in error_of(
        lambda: slots.replace("rope", lambda x: x)
    )
    assert "linear: wanted backward_input and backward_weight" in error_of(
        lambda: slots.replace("linear", lambda x: x, backward_input=lambda dy: dy)
    )
    assert "adamw: wanted a slot that takes functions" in error_of(
        lambda: slots.replace("adamw", lambda x: x)
    )


def test_a_wrapper_returns_an_op():
    core = FakeCore()
    slots = feature.Slots("mine", core)
    slots.wrap("swiglu", lambda inner: inner.forward, "w")
    inner = {"forward": len, "backward": len}
    assert "wanted w to return an op (inner.with_functions(...)), got builtin" in error_of(
        lambda: core.slots.wrapper(inner)
    )
    op = feature.Op(inner)
    assert "wanted functions of forward, backward, got 'forwards'" in error_of(
        lambda: op.with_functions(forwards=len)
    )
    assert op.with_functions(forward=max).forward is max
    with pytest.raises(AttributeError, match="an op with forward, backward has no backwards"):
        op.backwards  # noqa: B018


def test_an_error_inside_names_feature_slot_and_line(tmp_path):
    from banyan.feature import calls

    path = tmp_path / "bad.py"
    path.write_text("def forward(gate_up):\n    return 1 / 0\n")
    from banyan import user_code

    call = calls.named(
        "mine", "swiglu", "forward", user_code.load_file("k", path).forward, ["gate_up"]
    )
    with pytest.raises(
        RunError, match=r"feature mine: swiglu: forward failed: ZeroDivisionError.*\(line 2\)"
    ):
        call({"gate_up": None})
