"""The prompt: from the command line, from files or from stdin, with a question about it or without."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hardkv.errors import InputError

PromptText = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", show_default=False, help="The prompt; '-' or nothing reads it from stdin."),
]
PromptFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompt-file",
        "-f",
        metavar="FILE",
        show_default=False,
        help="Read the prompt from a UTF-8 text file. Repeatable: the files are joined to one document.",
    ),
]
Question = Annotated[
    str | None,
    typer.Option("--question", "-q", metavar="TEXT", show_default=False, help="A question about the prompt's text."),
]

_ABOUT_DOCUMENT = "Read the document and answer the question.\n\n{document}\n\nQuestion: {question}"


def about_document(document: str, question: str) -> str:
    """Give the prompt that asks a question about a document."""
    return _ABOUT_DOCUMENT.format(document=document.strip(), question=question.strip())


def read_prompt(prompt: str | None, files: Sequence[Path] | None, question: str | None) -> str:
    """Give the text to send to the model; several files make one document.

    Raises:
        InputError: no prompt, two of them, an empty one, or one that is not UTF-8 text.
    """
    if files and prompt is not None:
        raise InputError("got both PROMPT and --prompt-file; give one, and ask about the file with --question")
    if files:
        text = "\n\n".join(_file(path) for path in files)
    elif prompt is not None and prompt != "-":
        text = prompt
    elif prompt == "-" or not sys.stdin.isatty():
        text = _stdin()
    else:
        raise InputError("no prompt: give PROMPT, --prompt-file FILE, or pipe a text to stdin")
    if not text.strip():
        raise InputError("the prompt is empty: give PROMPT, --prompt-file FILE, or pipe a text to stdin")
    if question is not None and not question.strip():
        raise InputError("--question is empty; leave it out to send the prompt as it is")
    return text if question is None else about_document(text, question)


def _file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").rstrip("\n")
    except FileNotFoundError:
        raise InputError(f"--prompt-file {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompt-file {path}: expected a file of UTF-8 text ({error})") from None


def _stdin() -> str:
    try:
        return sys.stdin.read().rstrip("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"stdin: expected UTF-8 text ({error})") from None
