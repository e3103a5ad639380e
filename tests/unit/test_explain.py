"""The catalogue of codes, and the command that prints it."""

import dataclasses
import os
import re
import subprocess
import sys

import pytest

from ddpcov.commands import main
from ddpcov.diagnosis.codes import CODES, SLUGS

# Stable: codes are added, never changed.
PROMISED = {
    "DDC101": "never-called",
    "DDC102": "never-read",
    "DDC103": "no-grad-region",
    "DDC104": "graph-cut",
    "DDC105": "output-not-in-loss",
    "DDC106": "result-discarded",
    "DDC107": "loss-detached",
    "DDC108": "undefined-gradient",
    "DDC109": "zero-gradient",
    "DDC110": "checkpoint-cut",
    "DDC111": "independent",
    "DDC201": "some-steps",
    "DDC202": "some-ranks",
    "DDC203": "some-passes",
    "DDC301": "frozen-after-wrap",
    "DDC302": "thawed-after-wrap",
    "DDC303": "replaced-after-wrap",
    "DDC304": "wrapper-bypassed",
    "DDC305": "opaque-output",
    "DDC306": "reached-twice",
    "DDC307": "needless-flag",
    "DDC308": "graph-changed",
    "DDC309": "gradients-differ",
    "DDC310": "unsynchronised-pass",
    "DDC401": "not-in-optimizer",
    "DDC402": "unregistered",
    "DDC403": "optimizer-stale",
    "DDC501": "shard-incomplete",
    "DDC502": "rank-missing",
    "DDC503": "parameters-differ",
}
TEXTS = ("means", "established", "fix", "harmless")
ASKS_FOR_THE_FLAG = "DistributedDataParallel(model, find_unused_parameters=True)"


def words(text):
    return " ".join(text.split())


def test_every_promised_code_is_there():
    assert SLUGS == PROMISED | {"DDC100": "missed", "DDC504": "nothing-recorded"}


def test_catalogue_agrees_with_itself():
    assert list(CODES) == sorted(CODES)
    assert {key: code.code for key, code in CODES.items()} == {key: key for key in CODES}
    assert {key: code.slug for key, code in CODES.items()} == SLUGS
    assert len(set(SLUGS.values())) == len(SLUGS)


def test_a_code_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CODES["DDC101"].slug = "other"
    assert not hasattr(CODES["DDC101"], "__dict__")


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", TEXTS)
def test_texts(code, name):
    text = getattr(CODES[code], name)
    assert text.endswith(".")
    assert text == words(text)
    assert text.isascii()  # so that any terminal can show it
    assert text.count("`") % 2 == 0
    assert set(re.findall(r"DDC\d+", text)) <= set(CODES)


@pytest.mark.parametrize("code", CODES)
def test_code_in_a_fix_is_code(code):
    snippets = re.findall(r"`([^`]*)`", CODES[code].fix)
    assert snippets
    for snippet in snippets:
        if snippet[0] not in ".@":  # an attribute's or a decorator's name
            compile(f"def f():\n    {snippet}" + " pass" * snippet.endswith(":"), code, "exec")


def test_the_flag_is_advised_only_where_the_set_varies():
    assert {code.code for code in CODES.values() if ASKS_FOR_THE_FLAG in code.fix} == {"DDC201", "DDC202", "DDC308"}


@pytest.mark.parametrize("code", CODES)
def test_all_of_a_code_is_printed(code, capsys):
    assert main(["explain", code]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[0] == f"{code} {SLUGS[code]}"
    assert [name for name in TEXTS if getattr(CODES[code], name) not in words(out)] == []
    assert max(map(len, out.splitlines())) <= 80
    snippets = [s for name in TEXTS for s in re.findall(r"`[^`]*`", getattr(CODES[code], name))]
    assert [s for s in snippets if s not in out] == []  # none is broken between lines


@pytest.mark.parametrize("asked", ["ddc105", "Ddc105", "output-not-in-loss", "OUTPUT-not-in-loss"])
def test_any_case_and_slugs(asked, capsys):
    main(["explain", "DDC105"])
    expected = capsys.readouterr()
    assert main(["explain", asked]) == 0
    assert capsys.readouterr() == expected


def test_several_in_the_order_asked_for(capsys):
    assert main(["explain", "DDC307", "never-called", "ddc307"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^DDC\d+ [\w-]+$", out, re.MULTILINE) == ["DDC307 needless-flag", "DDC101 never-called"]


def test_list_of_all(capsys):
    assert main(["explain"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert dict(re.findall(r"^(DDC\d+)  ([\w-]+) ", out, re.MULTILINE)) == SLUGS
    assert max(map(len, out.splitlines())) <= 80
    for code in CODES.values():
        said = next(text for text in re.split(r"\n(?=DDC)", out) if text.startswith(code.code))
        sentence = words(said.removeprefix(code.code).replace(code.slug, "", 1))
        assert sentence.endswith(".")
        assert code.means == sentence or code.means.startswith(f"{sentence} ")


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("DDC1055", "did you mean DDC105 (output-not-in-loss)?"),
        ("DDC999", None),
        ("never-caled", "did you mean DDC101 (never-called)?"),
        ("xyzzy", "without an argument, explain lists all codes"),
        ("", "without an argument"),
        ("two\nlines", None),
    ],
)
def test_unknown(asked, hint, capsys):
    assert main(["explain", "DDC105", asked]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith(f"ddpcov explain: no code {asked!r}; ")
    assert hint is None or hint in line


def test_several_unknown_in_one_line(capsys):
    assert main(["explain", "foo", "never-caled"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'foo'" in line and "'never-caled'" in line


def test_as_a_process_without_torch_or_unicode():
    command = [
        sys.executable,
        "-c",
        "import sys; sys.modules['torch'] = None; from ddpcov.commands import main; sys.exit(main())",
    ]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    for arguments, code in ((["explain", "DDC104"], 0), (["explain"], 0), (["explain", "DDC10x\u00e9"], 2)):
        done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == code
        assert "Traceback" not in done.stderr


def test_reader_that_had_enough():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "ddpcov", "explain", *CODES]
    with os.fdopen(writing, "w") as stream:
        done = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
