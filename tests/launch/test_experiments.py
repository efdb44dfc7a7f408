"""Experiment files and typed overrides."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from k3train import config_io
from k3train.config import Experiment, ModelConfig
from k3train.errors import UserError
from launch import cli, experiments

HEADER = "from k3train.config import *\ndef experiment():\n    "


PEAKS = "did you mean --optimizer.peak-lr or --optimizer.muon.peak-lr or --optimizer.adamw.peak-lr?"


def resolve(path, *overrides) -> Experiment:
    return experiments.resolve(path, overrides, "k3train train")


def refusal(path, *overrides) -> str:
    with pytest.raises(UserError) as caught:
        resolve(path, *overrides)
    return str(caught.value)


def test_without_overrides_the_file_decides(tiny_experiment):
    experiment = resolve(tiny_experiment)
    assert (experiment.name, experiment.model.d_model, experiment.optimizer.peak_lr) == ("tiny", 16, 1e-3)


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "experiments").glob("*.py")), ids=lambda path: path.stem)
def test_the_shipped_experiments_hold_together(path):
    assert resolve(path).validate() == experiments.load(path)


def test_overrides_are_typed_and_take_dashes_and_underscores(tiny_experiment):
    experiment = resolve(
        tiny_experiment, "--model.d-model", "32", "--model.kda.head_dim=4", "--optimizer.peak-lr", "1",
        "--model.kda.gate-lower-bound", "-2.5",
        "--model.mixer-pattern", "kda", "kda", "gated_mla",
        "--model.last-mixer", "None", "--data.sources", "a", "b", "--seed", "11",
    )  # fmt: skip
    model = experiment.model
    assert (model.d_model, model.kda.head_dim, model.kda.gate_lower_bound) == (32, 4, -2.5)
    assert (model.mixer_pattern, model.last_mixer) == (("kda", "kda", "gated_mla"), None)
    assert experiment.optimizer.peak_lr == 1.0 and isinstance(experiment.optimizer.peak_lr, float)
    assert (experiment.data.sources, experiment.seed) == (("a", "b"), 11)


def test_a_switch_is_turned_off_by_its_negation(tiny_experiment):
    assert not resolve(tiny_experiment, "--logging.no-tensorboard").logging.tensorboard
    assert not resolve(tiny_experiment, "--logging.no_tensorboard", "--no-deterministic").logging.tensorboard


def test_overridden_experiment_survives_json(tiny_experiment, tmp_path):
    experiment = resolve(tiny_experiment, "--optimizer.peak-lr", "3e-4", "--data.sources", "x", "--model.last-mixer", "kda")
    config_io.save(experiment, tmp_path / "config.json")
    assert config_io.load(tmp_path / "config.json") == experiment


def test_help_lists_every_field_with_its_default(tiny_experiment, capsys):
    assert cli.main(["train", str(tiny_experiment), "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for field, _ in experiments._fields(Experiment):
        assert re.search(rf"--{re.escape(field.replace('_', '-'))}[ ,]", text), field
    assert "Steps between two lines of `metrics.jsonl`." in text.replace("│ │ ", "")
    assert "(default: 1e-08)" in text


@pytest.mark.parametrize(
    "argument, suggestion",
    [
        ("--optimizer.peek-lr", PEAKS),
        ("--lr", PEAKS),
        ("--optimzer.peak_lr=3", PEAKS),
        ("--num_heads", "did you mean --model.kda.num-heads or --model.mla.num-heads?"),
        ("--zzz", "--help after the experiment file lists every field"),
    ],
)
def test_unknown_field_names_the_nearest(tiny_experiment, argument, suggestion):
    message = refusal(tiny_experiment, argument, "3")
    assert message == f"unknown field {argument.partition('=')[0]}" + ("; " + suggestion)


@pytest.mark.parametrize(
    "overrides, told",
    [
        (["--model.d-model", "wide"], ["--model.d-model", "'wide'"]),
        (["--model.d-model", "0.5"], ["--model.d-model", "'0.5'"]),
        (["--model.d-model"], ["--model.d-model", "Missing value"]),
        (["--model.mixer-pattern", "kda", "rnn"], ["--model.mixer-pattern", "rnn", "gated_mla"]),
        (["seed=3"], ["seed=3"]),
    ],
)
def test_bad_values_name_the_field(tiny_experiment, capsys, overrides, told):
    assert cli.main(["train", str(tiny_experiment), *overrides]) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in told)
    assert "Traceback" not in message


def test_rules_are_checked_after_overrides(tiny_experiment):
    message = refusal(tiny_experiment, "--model.d-model", "-16", "--model.moe.experts-per-token", "5", "--data.batch-size", "0")
    assert "model.d_model = -16: must be greater than zero" in message
    assert "model.moe.experts_per_token = 5: model.moe.num_experts = 4 is fewer" in message
    assert "data.batch_size = 0" in message


@pytest.mark.parametrize(
    "text, message",
    [
        ("x = 1", "exp.py: defines no function `experiment() -> Experiment`"),
        ("experiment = 3", "exp.py: defines no function `experiment() -> Experiment`"),
        (HEADER + "return 3", "exp.py: experiment() returned int, must return k3train.config.Experiment"),
        (HEADER + "return undefined_name", "exp.py, line 3: NameError: name 'undefined_name' is not defined"),
        ("import no_such_module_anywhere", "exp.py, line 1: ModuleNotFoundError"),
        ("def experiment(:", "exp.py, line 1: SyntaxError"),
        ("raise SystemExit(0)", "exp.py, line 1: SystemExit"),
        ("class Stop(BaseException): pass\nraise Stop('enough')", "exp.py, line 2: Stop: enough"),
        (HEADER + "return Experiment(name='a', model=ModelConfig(d_modle=3))", "exp.py, line 3: TypeError"),
        (HEADER + "return Experiment(name='a', model=ModelConfig(d_model='3'))", "model.d_model = '3': must be a whole number"),
        (HEADER + "return Experiment(name='a', model=None)", "model = None: must be an object with the fields of ModelConfig"),
    ],
)
def test_files_that_give_no_experiment(experiment_file, text, message):
    assert message in refusal(experiment_file(text))


@pytest.mark.parametrize("before", ["", "import os; os.chdir('/')"])
def test_relative_path_gives_the_line_too(experiment_file, tmp_path, monkeypatch, before):
    (tmp_path / "below").mkdir()
    experiment_file(f"{before}\n" + HEADER + "return undefined_name")
    for folder, path in ((tmp_path, "exp.py"), (tmp_path / "below", "../exp.py")):
        monkeypatch.chdir(folder)
        assert refusal(Path(path)).startswith(f"{path}, line 4: NameError")


def test_interrupt_in_the_file_stays_one(experiment_file):
    with pytest.raises(KeyboardInterrupt):
        resolve(experiment_file("raise KeyboardInterrupt"))


def test_lists_and_whole_numbers_pass_for_tuples_and_floats(experiment_file):
    path = experiment_file(HEADER + "return Experiment(name='a', model=ModelConfig(mixer_pattern=['kda'], norm_eps=1))")
    model = resolve(path).model
    assert model == ModelConfig(mixer_pattern=("kda",), norm_eps=1.0)
    assert isinstance(model.norm_eps, float)


def test_missing_file_folder_and_other_suffix(tmp_path, experiment_file):
    assert "no_such.py: no such file" in refusal(tmp_path / "no_such.py")
    assert "is a folder" in refusal(tmp_path)
    assert "not a Python file" in refusal(experiment_file("x", "exp.txt"))


def test_files_may_define_dataclasses(experiment_file):
    text = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass Size:\n    d: int = 8\n"
    path = experiment_file(text + HEADER + "return Experiment(name='a', model=ModelConfig(d_model=Size().d))")
    assert resolve(path).model.d_model == 8


def test_saved_config_is_read_strictly(tiny_experiment, tmp_path):
    experiment = resolve(tiny_experiment)
    good = config_io.to_dict(experiment)
    bad = {**good, "colour": "red", "seed": True, "model": {**good["model"], "d_model": 1.5, "last_mixer": "rnn"}}
    del bad["name"]
    with pytest.raises(UserError) as caught:
        config_io.from_dict(Experiment, bad, "config.json")
    message = str(caught.value)
    assert message.startswith("config.json does not describe Experiment:")
    for part in ("colour: unknown field", "name: missing", "seed = True: must be a whole number", "model.d_model = 1.5", "'rnn'"):
        assert part in message
    older = {key: value for key, value in good.items() if key != "evaluation"}
    assert config_io.from_dict(Experiment, older) == dataclasses.replace(experiment, evaluation=type(experiment.evaluation)())


@pytest.mark.parametrize("text, message", [("{", "not JSON"), ("[]", "top level = []: must be an object")])
def test_saved_config_that_is_none(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        config_io.load(path)
    assert message in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("--seed", str(2**40), "seed = 1099511627776: must be at most 4294967295"),
        ("--seed", "-1", "seed = -1: must be zero or more"),
        ("--optimizer.adamw.beta1", "1.0", "optimizer.adamw.beta1 = 1.0: must be below 1"),
        ("--model.init-std", "inf", "model.init_std = inf: must be greater than zero and finite"),
        ("--data.sources", "", "data.sources holds an empty name"),
        ("--name", "a b", "must be a plain folder name"),
    ],
)
def test_values_that_would_mislead_are_refused(tiny_experiment, field, value, message):
    with pytest.raises(UserError) as error:
        experiments.resolve(tiny_experiment, [field, value], "k3train train")
    assert message in str(error.value)


@pytest.mark.parametrize("rest", [[], ["--name", "other"]])
def test_a_list_without_a_value_is_refused(tiny_experiment, rest):
    assert refusal(tiny_experiment, "--data.sources", *rest) == "--data.sources needs at least one value"
