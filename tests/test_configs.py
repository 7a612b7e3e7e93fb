"""Every configuration composes, and what is wrong with one is said plainly and before anything starts."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import programs
import pytest
from omegaconf import DictConfig, OmegaConf
from programs import nodes, refusal

from adabatch.config import schema, simulation
from adabatch.config.bounds import rules
from adabatch.config.compose import config_folder, options, register
from adabatch.config.usage import sentences
from adabatch.gradients.preconditioned import VIEWS
from adabatch.gradients.updates import UPDATES
from adabatch.gradients.taps import KINDS
from adabatch.stepping import PRECISIONS
from adabatch.policies import POLICIES

EVERY_FILE = sorted(path.relative_to(config_folder()) for path in config_folder().rglob("*.yaml"))
# What simulations alone are configured by has tests of its own.
SIMULATED = ("simulate.yaml", "truth", "cluster")
FILES = [path for path in EVERY_FILE if path.parts[0] not in SIMULATED]
ROOTS = [path.stem for path in FILES if len(path.parts) == 1]
OPTIONS = [(path.parts[0], path.stem) for path in FILES if len(path.parts) == 2]
# What an option leaves to the user.
NEEDS = {
    ("policy", "fixed"): {"policy.global_batch": "64"},
    ("policy", "step_price"): {"policy.price": "500"},
    ("policy", "norm_test"): {"policy.tolerance": "0.5"},
    ("policy", "inner_product_test"): {"policy.tolerance": "0.9"},
    ("policy", "cosine_test"): {"policy.similarity": "0.3"},
    ("policy", "loss_law"): {"policy.reference_batch": "64", "policy.reference_loss": "3.0"},
    ("policy", "ramp"): {
        "policy.first_batch": "16",
        "policy.final_batch": "64",
        "policy.increment": "16",
        "policy.length": "10k",
    },
    ("policy", "seesaw"): {"policy.first_batch": "32"},
    ("policy", "late_switch"): {"policy.first_batch": "32", "policy.final_batch": "96"},
    ("policy", "stages"): {"policy.stages": "0:16 1k:32"},
    ("policy", "replay"): {"policy.ledger": "runs/one"},
    ("data", "text"): {"data.path": "some.txt"},
}


def fitting(group: str, option: str) -> list[str]:
    """The programs that can use an option: all, unless it is of a group that recipes bring the schemas of."""
    roots = []
    for root in ROOTS:
        register(root, programs.load(root).SCHEMAS)
        roots += [root] if option in options(group) else []
    return roots


def leaves(config: DictConfig) -> list[str]:
    """The dotted names of all settings."""
    return [f"{at}.{key}".lstrip(".") for at, node in nodes(config) for key in node if not OmegaConf.is_dict(node[key])]


CASES = [(root, group, option) for group, option in OPTIONS for root in fitting(group, option)]


# -- every file


def test_every_file_is_a_root_or_an_option_and_is_composed_below() -> None:
    assert sorted(ROOTS) == sorted(programs.RECIPES)
    assert len(FILES) == len(ROOTS) + len(OPTIONS) >= 36
    assert {(group, option) for _, group, option in CASES} == set(OPTIONS)


@pytest.mark.parametrize(("root", "group", "option"), CASES)
def test_an_option_composes_into_typed_and_legal_values(root: str, group: str, option: str) -> None:
    needs = NEEDS.get((group, option), {})
    config = programs.composed(root, f"{group}={option}", *(f"{key}={value}" for key, value in needs.items()))
    assert [name for name, node in nodes(config) if not dataclasses.is_dataclass(OmegaConf.get_type(node))] == []
    if needs:
        assert refusal(root, f"{group}={option}") == f"these values must be given: {'=..., '.join(sorted(needs))}=..."


@pytest.mark.parametrize("root", ROOTS)
def test_a_root_needs_nothing_more(root: str) -> None:
    config = programs.composed(root)
    assert config.name == root
    assert config.policy.name == "target_efficiency"


def test_an_experiment_changes_what_it_says() -> None:
    assert programs.composed("lm", "experiment=quickstart").name == "quickstart"


def test_every_file_says_what_it_is_for() -> None:
    texts = {path: (config_folder() / path).read_text(encoding="utf-8") for path in EVERY_FILE}
    assert [path for path, text in texts.items() if not re.match(r"(# @package _global_\n)?# \w.{15,}\b", text)] == []


# -- schemas


SCHEMAS: dict[str, type] = {
    found.__name__: found
    for found in [
        *(one for one in vars(schema).values() if dataclasses.is_dataclass(one) and isinstance(one, type)),
        *(simulation.TRUTHS.values()),
        simulation.CurveConfig,
        simulation.ClusterConfig,
        simulation.SimulationConfig,
        *(one for root in ROOTS for group in programs.load(root).SCHEMAS.values() for one in group.values()),
    ]
}


@pytest.mark.parametrize("one", SCHEMAS.values(), ids=SCHEMAS)
def test_every_field_has_a_sentence(one: type) -> None:
    settings = [field.name for field in dataclasses.fields(one) if not is_section(field)]
    assert [name for name in settings if len(sentences(one).get(name, "")) < 5] == []


def is_section(field: dataclasses.Field) -> bool:
    return field.type in ("Any", "typing.Any") or str(field.type).endswith("Config")


@pytest.mark.parametrize("one", SCHEMAS.values(), ids=SCHEMAS)
def test_every_number_and_choice_has_bounds(one: type) -> None:
    free = {"stages", "ledger", "forecast", "path", "pattern", "runs", "run", "run_folder", "resume"}  # text that its user reads
    settings = [field for field in dataclasses.fields(one) if not is_section(field) and field.type != "bool"]
    abstract = {"name"} if one in (schema.OptimizerConfig, simulation.CurveConfig) else set()
    assert {field.name for field in settings} - set(rules(one)) - free - abstract == set()


def test_the_schemas_name_the_choices_that_the_parts_offer() -> None:
    assert set(schema.GROUPS["policy"]) == set(POLICIES)
    for one, name, valid in (
        (schema.NoiseConfig, "tap", KINDS),
        (schema.NoiseConfig, "geometry", ("auto", "euclidean", *VIEWS, "norm_layers", *UPDATES)),
        (schema.RunConfig, "precision", PRECISIONS),
    ):
        assert rules(one)[name].brief == ", ".join(valid)


def test_the_defaults_are_legal() -> None:
    for one in SCHEMAS.values():
        config = OmegaConf.structured(one)
        checked = [name for name in rules(one) if not OmegaConf.is_missing(config, name) and config[name] is not None]
        assert [name for name in checked if not rules(one)[name].accepts(config[name])] == []


# -- what is refused when composing


@pytest.mark.parametrize("root", ROOTS)
def test_a_typo_at_any_level_is_refused_with_the_valid_names_and_the_nearest(root: str) -> None:
    config = programs.composed(root)
    names = [name for name in leaves(config) if len(name.rpartition(".")[2]) > 2]
    lines = refusal(root, *(f"{name}e=1" for name in names)).splitlines()
    sentence = {line.split()[3].rstrip("."): line for line in lines}
    assert len(names) > 60
    for name in names:
        section, _, last = name.rpartition(".")
        siblings = OmegaConf.select(config, section) if section else config
        assert f"Did you mean {name}?" in sentence[f"{name}e"]
        valid = f"Valid names in {section or 'the top level'}: {', '.join(sorted(siblings))}"
        assert sentence[f"{name}e"].endswith(valid)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("polcy=fixed", "there is no polcy. Did you mean policy?"),
        ("lr=0.1", "there is no lr. There is optimizer.lr."),
        ("policy.global_batch=32", "It belongs to policy=fixed."),
        ("optimizer.momentum=0.5", "It belongs to optimizer=sgd and optimizer=muon."),
        ("limits.micr=4", "Did you mean limits.micro_batch?"),
        ("limits.micro_batch.x=4", "Valid names in limits.micro_batch: none"),
        ("model.layers.width=4", "there is no model.layers.width"),
        ("schema/policy=fixed", "there is no schema/policy"),
    ],
)
def test_a_name_that_is_nowhere_or_elsewhere(override: str, words: str) -> None:
    assert words in refusal("lm", override)


def test_an_unknown_option_lists_those_of_the_group() -> None:
    assert refusal("lm", "policy=fixd") == (
        "there is no policy=fixd. Did you mean fixed? Valid options: cabs, cosine_test, fixed, inner_product_test, "
        "late_switch, loss_law, norm_test, observe, ramp, replay, seesaw, stages, step_price, target_efficiency, wall_clock"
    )
    assert refusal("lm", "experiment=nope").endswith("Valid options: quickstart")
    for value in ("null", "5", "{name: fixed}", "[fixed,observe]"):
        assert "Valid options: cabs, cosine_test, fixed" in refusal("lm", f"policy={value}")


def test_the_options_of_another_recipe_are_none() -> None:
    assert refusal("lm", "model=convnet").endswith("Valid options: gpt_medium, gpt_small, gpt_tiny")
    assert refusal("image", "data=stdlib").endswith("Valid options: mnist, mnist5k")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.lr=low", "optimizer.lr: Value 'low' of type 'str' could not be converted to Float"),
        ("limits.micro_batch=4.5", "limits.micro_batch: Value '4.5' of type 'float' could not be converted to Integer"),
        ("limits.max_batch=4k", "limits.max_batch: Value '4k' of type 'str' could not be converted to Integer"),
        ("noise.enabled=maybe", "noise.enabled: Value 'maybe' is not a valid bool"),
        ("logger.names=jsonl", "logger.names: Invalid value assigned: str is not a ListConfig"),
        ("seed=null", "seed: field 'seed' is not Optional"),
        ("stop=null", "stop: field 'stop' is not Optional"),
        ("stop.seconds=[1]", "stop.seconds: "),
        ("model.tied=2.5", "model.tied: "),
        ("hydra.foo=1", "hydra.foo: "),
    ],
)
def test_a_wrong_type_is_refused_with_its_key(override: str, words: str) -> None:
    message = refusal("lm", override)
    assert message.startswith(words)
    assert "full_key" not in message and "object_type" not in message


@pytest.mark.parametrize("override", ["+foo=1", "++seed=1", "+policy.foo=1", "~policy", "~seed", "policy@x=fixed"])
def test_keys_are_neither_added_deleted_nor_moved(override: str) -> None:
    assert "write " in refusal("lm", override)


def test_text_that_the_shell_has_unquoted() -> None:
    assert "quote it within the shell's quotes: 'policy.stages=\"0:16, 1k:32\"'" in refusal(
        "lm", "policy=stages", "policy.stages=0:16, 1k:32"
    )
    config = programs.composed("lm", "policy=stages", 'policy.stages="0:16, 1k:32"', 'runs="a b/c=d"')
    assert (config.policy.stages, config.runs) == ("0:16, 1k:32", "a b/c=d")
    assert "overrides are key=value" in refusal("lm", "runs=a=b")
    assert "overrides are key=value" in refusal("lm", "policy")


def test_missing_values_are_named_all_at_once_and_so_are_those_taken_from_them() -> None:
    """Field case E10: a missing value, and an interpolation to it."""
    taken = "limits.min_batch=${limits.max_batch}"
    assert refusal("lm", "data=text", "policy=fixed", "limits.max_batch=???", taken) == (
        "these values must be given: data.path=..., limits.max_batch=..., limits.min_batch=..., policy.global_batch=..."
    )
    assert refusal("lm", "name=${nope}") == "name: Interpolation key 'nope' not found"


def test_illegal_values_are_named_all_at_once() -> None:
    assert refusal("image", "optimizer.lr=0", "optimizer.momentum=1", "data.shift=28").splitlines() == [
        "data.shift must be in [0, 28), got 28",
        "optimizer.lr must be in (0, inf), got 0.0",
        "optimizer.momentum must be in [0, 1), got 1.0",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("target_eficiency: 0.5", "In 'policy/target_efficiency': ConfigKeyError .*\\nKey 'target_eficiency' not in"),
        ("target_efficiency: half", "In 'policy/target_efficiency': ValidationError .*\\nValue 'half' of type 'str'"),
        ("target_efficiency: 1.5", "policy.target_efficiency must be in .0, 1., got 1.5"),
        ("target_efficiency: ${nope}", "policy.target_efficiency: Interpolation key 'nope' not found"),
        ("target_efficiency: [", "policy/target_efficiency.yaml\", line 6"),
    ],
)
def test_a_mistake_in_a_file_is_refused_with_the_file_or_the_key(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = programs.own_files(tmp_path / "files", monkeypatch) / "policy" / "target_efficiency.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace("target_efficiency: 0.5 ", f"{text} "), encoding="utf-8")
    message = refusal("lm")
    assert re.search(words, message)
    assert "full_key" not in message and "object_type" not in message
