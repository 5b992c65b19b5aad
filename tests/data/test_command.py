import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megagrid.cli import main
from megagrid.data.command import add_arguments, run
from megagrid.errors import DataError
from tests.data.files import TEXT


def call(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(argument) for argument in arguments]))


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": TEXT + str(i)}) + "\n" for i in range(40)))
    return path


def test_prepare_then_inspect(source, tmp_path, capsys):
    out = tmp_path / "corpus" / "code"
    trained = ["--train-tokenizer", "--vocab-size", 380, "--workers", 1]
    assert call("prepare", "--input", source, "--output", out, *trained) == 0
    said = capsys.readouterr().out
    assert "documents   40\n" in said
    assert f'data.paths = ["{out}"], model.vocab_size = 380' in said

    assert call("inspect", out, "--verify", "--show", 12) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"vocabulary  380 ids, \d+ of them used, largest 3\d\d, stored as uint16", said
    )
    assert re.search(r"entropy     [3-5]\.\d{4} nats a token", said)
    assert "begins      'def walk" in said
    assert "(verified)" in said


def test_the_tokenizer_of_one_corpus_serves_another(source, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    trained = ["--train-tokenizer", "--vocab-size", 380, "--workers", 1]
    call("prepare", "--input", source, "--output", first, *trained)
    model = f"{first}.tokenizer.model"
    call("prepare", "--input", source, "--output", second, "--tokenizer", model, "--workers", 1)
    for suffix in (".bin", ".idx", ".tokenizer.model"):
        assert Path(f"{first}{suffix}").read_bytes() == Path(f"{second}{suffix}").read_bytes()


@pytest.mark.parametrize(("option", "value"), [("--workers", 0), ("--vocab-size", 0)])
def test_numbers_below_one_are_refused(source, tmp_path, option, value):
    arguments = ["--input", source, "--output", tmp_path / "o", "--train-tokenizer"]
    with pytest.raises(DataError, match=f"{option}=0 must be at least 1"):
        call("prepare", *arguments, option, value)


@pytest.mark.parametrize("output", ["", "/", "corpus/", ".", "corpus/.."])
def test_an_output_that_is_a_folder_is_refused(source, output):
    with pytest.raises(DataError, match=r'--output=".*" names a folder; add .*text"'):
        call("prepare", "--input", source, "--output", output, "--tokenizer", "bytes")


def test_more_pieces_than_an_int_holds_are_refused(source, tmp_path):
    arguments = ["--input", source, "--output", tmp_path / "o", "--train-tokenizer"]
    with pytest.raises(DataError, match="--vocab-size=99999999999"):
        call("prepare", *arguments, "--vocab-size", 99999999999, "--workers", 1)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_in_place_of_its_prefix_is_refused_with_the_prefix(source, tmp_path, suffix):
    out = tmp_path / "out"
    call("prepare", "--input", source, "--output", out, "--tokenizer", "bytes", "--workers", 1)
    with pytest.raises(DataError, match=f'the prefix of these files is "{out}"$'):
        call("inspect", f"{out}{suffix}")
    with pytest.raises(DataError, match="--show=-1 must be at least 0"):
        call("inspect", out, "--show", -1)


def test_inspecting_nothing_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"none\.idx doesn't exist"):
        call("inspect", tmp_path / "none")


def test_the_data_layer_imports_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; import megagrid.data, megagrid.data.command, "
        "megagrid.data.prepare; print('sentencepiece' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_the_verb_answers_a_bad_line_with_one_line_and_status_2(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": \n')
    paths = ["--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "o")]
    assert main(["data", "prepare", *paths, "--tokenizer", "bytes"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert "a.jsonl:2: not a line of JSON" in line
