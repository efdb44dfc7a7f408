"""The `k3train` command: help, exit codes, messages, and the figures of `summary`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3train import config_io
from launch import cli, experiments, train

REPOSITORY = Path(__file__).resolve().parents[2]
KIMI_K3 = REPOSITORY / "experiments" / "kimi_k3_2p8t.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "launch.cli", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)


def refusal(capsys, *arguments: object) -> str:
    """The one message with which a command fails."""
    assert cli.main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("k3train: ") and "Traceback" not in captured.err
    return captured.err


def test_help_shows_every_command_and_starts_fast():
    start = time.perf_counter()
    done = run("--help")
    seconds = time.perf_counter() - start
    assert done.returncode == 0
    for line in (
        "train      start a run",
        "resume     go on with a run",
        "summary    count parameters",
        "score      write a model's logits",
        "generate   go on with a text",
        "evaluate   score a checkpoint",
    ):
        assert line in done.stdout
    assert seconds < 5  # about 0.1 on an idle machine; JAX alone takes a second and this test shares its cores


def test_help_and_field_errors_import_no_jax(tiny_experiment):
    code = "import sys; from launch import cli; cli.main(sys.argv[1:]); sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    for arguments in (["--help"], ["train", str(tiny_experiment), "--help"], ["train", str(tiny_experiment), "--model.d-model", "-3"]):
        done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0, (arguments, done.stderr)


def test_errors_go_to_stderr_with_code_2():
    done = run("train", "no_such_experiment.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "k3train: no_such_experiment.py: no such file; give a Python file that defines `experiment() -> Experiment`"
    ]


@pytest.mark.parametrize("arguments", [["--traceback", "train", "no_such.py"], ["train", "no_such.py", "--traceback"]])
def test_traceback_on_request(capsys, arguments):
    assert cli.main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("Traceback") and message.splitlines()[-1].startswith("k3train: no_such.py")


def test_reader_that_goes_away():
    done = subprocess.run(
        f"{sys.executable} -m launch.cli train {KIMI_K3} --help | head -1", cwd=REPOSITORY, shell=True, capture_output=True, text=True
    )
    assert done.stderr == ""


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("k3train ")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "required: EXPERIMENT.py"),
        (["train", "--seed", "3", "experiment.py"], "an experiment's fields come after its file"),
        (["resume"], "required: RUN"),
        (["score", "model"], "required: --tokens, --out"),
        (["score", "model", "--tokens", "a", "--out", "b", "--batch-size", "many"], "invalid int value: 'many'"),
    ],
)
def test_wrong_usage(capsys, arguments, message):
    assert message in refusal(capsys, *arguments)


def test_summary_of_the_released_model_takes_little_time_and_memory():
    code = (
        "import resource, sys, time; from launch import cli; cli.main(sys.argv[1:]);"
        "print(time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "summary", str(KIMI_K3), "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=True)
    seconds, kibibytes = map(float, done.stderr.split()[-2:])  # of the processor: other tests may run beside this one
    assert seconds < 60 and kibibytes < 4 * 2**20
    summary = json.loads(done.stdout)
    assert f"{summary['parameters_total']:.4e}" == "2.7795e+12"
    assert f"{summary['parameters_active']:.4e}" == "1.0419e+11"

    parts = summary["by_part"]
    # Per layer or per matrix, from the published shapes.
    assert parts["kda"]["parameters_total"] == 69 * 443_740_384
    assert parts["gated_mla"]["parameters_total"] == 24 * 232_196_096
    assert parts["dense_feed_forward"]["parameters_total"] == 726_663_168
    assert parts["routed_experts"]["parameters_total"] == 92 * 896 * 33_030_144
    assert parts["routed_experts"]["parameters_active"] == 92 * 16 * 33_030_144
    others = ("router", "latent_projections", "shared_experts")
    assert sum(parts[name]["parameters_total"] for name in others) == 92 * 189_927_808
    assert parts["norms"]["parameters_total"] + parts["attention_residuals"]["parameters_total"] == (6 * 93 + 3) * 7168
    assert (parts["embedding"]["parameters_total"], parts["embedding"]["parameters_active"]) == (163840 * 7168, 0)
    for column in ("parameters_total", "parameters_active", "forward_flops_per_token"):
        assert sum(part[column] for part in parts.values()) == summary[column]
    assert summary["training_flops_per_token"] == 3 * summary["forward_flops_per_token"]


def test_summary_follows_overrides_and_prints_a_table(tiny_experiment, capsys):
    assert cli.main(["summary", str(tiny_experiment), "--model.vocab-size", "300", "--data.sequence-length", "64"]) == 0
    table = capsys.readouterr().out
    assert "tiny: rows of 64 tokens" in table
    embedding = next(line for line in table.splitlines() if "embedding " in line and "│" in line)
    assert "4,800" in embedding  # 300 x 16
    assert "routed experts" in table and "3 x forward" in table


def test_summary_json_option_stands_anywhere(tiny_experiment, capsys):
    results = []
    for arguments in (["--json", tiny_experiment, "--seed", "1"], [tiny_experiment, "--seed", "1", "--json"]):
        assert cli.main(["summary", *map(str, arguments)]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0] == results[1]


def test_a_folder_with_a_run_is_refused_and_left_alone(tiny_experiment, tmp_path, capsys):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("kept")
    message = refusal(capsys, "train", tiny_experiment, "--runs-folder", tmp_path)
    assert f"{folder} already holds a run" in message and f"mv {folder}" in message and "--name" in message  # nothing is saved
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"config.json": "{}", "metrics.jsonl": "kept"}


@pytest.mark.parametrize(
    "make", [lambda path: path.write_text("mine"), lambda path: (path.mkdir(), (path / "notes.txt").write_text("mine"))]
)
def test_other_things_in_the_runs_place_are_left_alone(tiny_experiment, tmp_path, capsys, make):
    make(tmp_path / "tiny")
    assert "is not an empty folder" in refusal(capsys, "train", tiny_experiment, "--runs-folder", tmp_path)
    kept = tmp_path / "tiny" / "notes.txt" if (tmp_path / "tiny").is_dir() else tmp_path / "tiny"
    assert kept.read_text() == "mine"


def test_a_start_that_was_cut_off_can_be_given_again(tiny_experiment, tmp_path):
    experiment = experiments.resolve(tiny_experiment, ["--runs-folder", str(tmp_path)], "k3train train")
    folder = train.new_run_folder(experiment)
    assert train.new_run_folder(experiment) == folder == tmp_path / "tiny"
    assert config_io.load(folder / "config.json") == experiment


def test_a_run_that_fails_on_its_input_leaves_no_folder(tiny_experiment, tmp_path, capsys):
    missing = tmp_path / "no_texts"
    assert "no_texts" in refusal(capsys, "train", tiny_experiment, "--runs-folder", tmp_path / "runs", "--data.sources", missing)
    assert not (tmp_path / "runs" / "tiny").exists()


def test_runs_folder_that_cannot_be_made(tiny_experiment, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in refusal(capsys, "train", tiny_experiment, "--runs-folder", tmp_path / "file")


def test_resume_needs_a_run(tmp_path, capsys):
    assert "no such folder" in refusal(capsys, "resume", tmp_path / "none")
    assert "is not a run" in refusal(capsys, "resume", tmp_path)
    (tmp_path / "config.json").write_text('{"name": "x"}')
    assert "model: missing" in refusal(capsys, "resume", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k3"}')
    assert "is a Hugging Face folder, not a run" in refusal(capsys, "resume", tmp_path)


def test_resume_without_a_checkpoint(tiny_experiment, tmp_path, capsys):
    experiment = experiments.resolve(tiny_experiment, ["--runs-folder", str(tmp_path)], "k3train train")
    folder = train.new_run_folder(experiment)
    assert "no checkpoint" in refusal(capsys, "resume", folder)
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_running_out_of_memory_is_one_message(monkeypatch, capsys):
    def run(_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 102800000000 bytes.")

    monkeypatch.setattr("launch.summary.run", run)
    assert cli.main(["summary", "any.py"]) == 2
    assert "out of memory" in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_written_ends_the_process(tiny_experiment, tmp_path):
    """A full disk, as the checkpoint library sees it: the process says so and ends, though its threads still wait."""
    script = (
        "import threading, time\n"
        "from k3train.errors import UserError\n"
        "from launch import cli, summary\n"
        "def run(_):\n"
        "    threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "    raise UserError('a checkpoint could not be written')\n"
        "summary.run = run\n"
        "import sys; sys.argv = ['k3train', 'summary', 'any.py']\n"
        "cli.command()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert ended.returncode == 2 and "could not be written" in ended.stderr
