"""Turns what users pass as prompts into lists of token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hardkv.errors import InputError

EXPECTED = (
    "a string, a list of strings, a chat (list of {'role', 'content'} messages), a list of chats, "
    "token ids (list of int or a 1-D tensor) or a batch of token ids"
)


@dataclass(frozen=True)
class Prompts:
    """Token ids of every prompt, and whether the user passed just one."""

    token_ids: list[list[int]]
    single: bool


def read_prompts(prompts: Any, tokenizer: Any, vocabulary: int) -> Prompts:
    """Tokenize one prompt or many.

    Raises:
        InputError: a wrong type, an empty prompt, an id outside the vocabulary, or a chat the tokenizer has no
            template for.
    """
    if isinstance(prompts, torch.Tensor):
        if prompts.ndim not in (1, 2) or prompts.is_floating_point():
            raise InputError(
                f"expected {EXPECTED}; got a tensor of shape {tuple(prompts.shape)} and type {prompts.dtype}"
            )
        prompts = prompts.tolist()
    single = _is_one(prompts)
    many = [prompts] if single else prompts
    if isinstance(many, str | bytes | Mapping) or not isinstance(many, Sequence):
        raise InputError(f"expected {EXPECTED}; got {type(prompts).__name__}")
    if not many:
        raise InputError(f"expected at least one prompt; got an empty {type(prompts).__name__}")
    ids = [_read_one(prompt, tokenizer, index, len(many)) for index, prompt in enumerate(many)]
    for index, row in enumerate(ids):
        if not row:
            raise InputError(f"{_where(index, len(many))} is empty; give at least one token")
        outside = [token for token in row if not 0 <= token < vocabulary]
        if outside:
            raise InputError(
                f"{_where(index, len(many))} holds token id {outside[0]}; the vocabulary has ids 0 to {vocabulary - 1}"
            )
    return Prompts(ids, single)


def _is_one(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence) or not len(prompts):
        return False
    return isinstance(prompts[0], int | Mapping)


def _read_one(prompt: Any, tokenizer: Any, index: int, count: int) -> list[int]:
    if isinstance(prompt, str):
        if not prompt:
            raise InputError(f"{_where(index, count)} is an empty string")
        return [int(token) for token in tokenizer(prompt)["input_ids"]]
    if isinstance(prompt, torch.Tensor) and prompt.ndim == 1 and not prompt.is_floating_point():
        return [int(token) for token in prompt.tolist()]
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        if all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
            return list(prompt)
        if all(isinstance(message, Mapping) for message in prompt):
            return _read_chat(prompt, tokenizer, index, count)
    raise InputError(f"{_where(index, count)}: expected {EXPECTED}; got {_describe(prompt)}")


def _read_chat(chat: Sequence[Any], tokenizer: Any, index: int, count: int) -> list[int]:
    for message in chat:
        if set(message) < {"role", "content"} or not isinstance(message.get("role"), str):
            raise InputError(
                f"{_where(index, count)}: a message needs 'role' and 'content', such as "
                f"{{'role': 'user', 'content': 'Hello'}}; got keys {sorted(map(str, message))}"
            )
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"{_where(index, count)} is a chat, but this model's tokenizer has no chat template; pass text"
        )
    encoded = tokenizer.apply_chat_template(list(chat), add_generation_prompt=True, tokenize=True, return_dict=True)
    return [int(token) for token in encoded["input_ids"]]


def _describe(prompt: Any) -> str:
    if isinstance(prompt, Sequence) and len(prompt):
        return f"a {type(prompt).__name__} of {', '.join(sorted({type(item).__name__ for item in prompt}))}"
    return f"{type(prompt).__name__} ({prompt!r})"[:120]


def _where(index: int, count: int) -> str:
    return "the prompt" if count == 1 else f"prompt {index} of {count}"
