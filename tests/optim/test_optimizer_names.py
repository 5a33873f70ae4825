"""What is written of the optimizers names all of them, and of an argument or a state those that have it."""

from __future__ import annotations

import re
from pathlib import Path

from offloadzero.config.keys import DEEPSPEED_KEYS, OWN_KEYS, Action
from offloadzero.config.schema import OPTIMIZERS
from offloadzero.update.specs import KNOWN_CLASSES, SPECS

DOCS = Path(__file__).parents[2] / "docs"
ARGUMENTS = {
    key: spec.note for key, spec in DEEPSPEED_KEYS["optimizer.params"].items() if spec.action is Action.USE
}


def names_in(text: str) -> list[str]:
    """The optimizers that a text names, in its order."""
    return [name for name in re.findall(r"\w+", text) if name in OPTIMIZERS]


def test_the_sentence_of_the_type_names_all() -> None:
    assert names_in(DEEPSPEED_KEYS["optimizer"]["type"].note) == list(OPTIMIZERS)


def test_the_sentence_of_an_argument_begins_with_those_that_take_it() -> None:
    """Unless all do. AdamW is Adam here, and `adam_w_mode` makes the difference."""
    assert ARGUMENTS.keys() == {key for arguments in OPTIMIZERS.values() for key in arguments}
    types = [name for name in OPTIMIZERS if name != "AdamW"]
    for key in ARGUMENTS.keys() - {"adam_w_mode"}:
        taking = [name for name in types if key in OPTIMIZERS[name]]
        begin = re.match(r"[A-Z]\w*(?:, [A-Z]\w*)*(?=: )", ARGUMENTS[key])
        assert (names_in(begin[0]) if begin else types) == taking, key


def test_the_sentence_of_a_state_names_those_that_keep_it() -> None:
    for state in {state for spec in SPECS for state in spec.states}:
        for path in ("offloadzero.placement", "offloadzero.placement[]"):
            (among,) = re.findall(r"\((.*)\)$", OWN_KEYS[path][state].note)
            assert among.split(", ") == [spec.name for spec in SPECS if state in spec.states], state


def test_the_documents_name_each() -> None:
    engine, status = ((DOCS / name).read_text() for name in ("engine.md", "status.md"))
    assert [cls.__name__ for cls in KNOWN_CLASSES if not re.search(rf"\b{cls.__name__}\b", engine)] == []
    (line,) = re.findall(r"^\|.*fp32 parameters; (.*?) \|", status, re.MULTILINE)
    assert names_in(line) == list(OPTIMIZERS)
