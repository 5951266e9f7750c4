"""hardkv as a model of lm-evaluation-harness, registered as `hardkv` where this module is imported."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from hardkv.errors import HardKVError, InputError
from hardkv.evaluation.lm_eval_scoring import CallLimits, fit, plan_calls, plan_runs, score
from hardkv.evaluation.lm_eval_settings import read_arguments, read_device, read_generation, read_sequences
from hardkv.evaluation.report import provenance
from hardkv.model_adapter import load_model
from hardkv.runtime import HardKVRuntime

logger = logging.getLogger(__name__)
_PLACES = 4  # sequences of one call per place in the batch: who ends early is followed by the next
_CALL_ELEMENTS = 2**28  # log-probabilities of one call, 1 GiB


@dataclass
class Usage:
    """What all calls together have used; `compressions == 0` says that nothing was ever dropped."""

    sequences: int = 0
    tokens_seen: int = 0
    compressions: int = 0
    kv_bytes_peak: int = 0


# lm_eval knows a model by this decorator alone; nothing else in hardkv imports this module.
@register_model("hardkv")
class HardKVLM(TemplateLM):  # type: ignore[misc]  # lm_eval is not there to be checked
    """A model of lm_eval that decodes with a compressed cache.

    `config`: path of a configuration; without, the defaults. `mean_tokens`: the same as `budget.mean_tokens`. Further
    `keys` are key paths, such as `cache.interval`. `max_length`: most tokens of a sequence, at most the model's
    positions. `decoded_context_tokens`: so many of the last context tokens of a log-likelihood are fed one by one, as
    if they had been generated, so that the first token is predicted from the compressed cache too.
    """

    def __init__(
        self,
        config: str | None = None,
        mean_tokens: int | None = None,
        max_length: int | None = None,
        decoded_context_tokens: int = 0,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **keys: Any,
    ) -> None:
        super().__init__()
        shortcuts = {
            "budget.mean_tokens": mean_tokens,
            "model.device": read_device(device),
            "cache.max_sequences": read_sequences(batch_size, max_batch_size),
        }
        ready = read_arguments(config, keys, shortcuts)
        self._decoded_tokens = _whole("decoded_context_tokens", decoded_context_tokens, 0)
        model = ready.config.model
        loaded = load_model(model.id, model.dtype, model.device, model.revision, model.pack_weights)
        self.runtime = HardKVRuntime(ready.config, ready.components, loaded)
        self.tokenizer: Any = self.runtime.tokenizer
        self.usage = Usage()
        positions = self.runtime.geometry.max_positions
        self.max_length = positions if max_length is None else _whole("max_length", max_length, 2, positions)
        self._call_sequences = _PLACES * ready.config.cache.max_sequences
        self._limits = CallLimits(self._call_sequences, positions, _CALL_ELEMENTS // len(self.tokenizer))
        added = self.tokenizer.added_tokens_decoder
        self._special = {token.content: index for index, token in added.items() if token.special}

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without a context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def max_gen_toks(self) -> int:
        """Most tokens to generate where a task does not say."""
        return self.runtime.config.generation.max_new_tokens

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in lm_eval's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a chat; without a generation prompt, its last message is left open."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise InputError("this model's tokenizer has no chat template; leave out --apply_chat_template")
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; a text that begins as the tokenizer would begin it, as of a chat, gets no second beginning."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode([self.prefix_token_id]))
        return [int(token) for token in self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"]]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to a stop text."""
        alike: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(index)
        texts = [""] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="hardkv: generate") as bar:
            for members in alike.values():
                normal = normalize_gen_kwargs(requests[members[0]].args[1], self.max_gen_toks)
                settings = read_generation(normal, self._special)
                seed = settings.pop("seed", self.runtime.config.seed)
                for start in range(0, len(members), self._call_sequences):
                    chosen = members[start : start + self._call_sequences]
                    contexts = [requests[index].args[0] for index in chosen]
                    # The runtime counts on from here, so that repeats of a request differ.
                    found = self._generate(contexts, settings, (seed + start) % 2**63)
                    for index, text in zip(chosen, found, strict=True):
                        texts[index] = text
                        self.cache_hook.add_partial("generate_until", requests[index].args, text)
                    bar.update(len(chosen))
        return texts

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text, in windows of `max_length`; all of a window but its prefix is decoded."""
        windows, owners = [], []
        for index, request in enumerate(requests):
            tokens, most = self.tok_encode(request.args[0]), self.max_length
            for pair in get_rolling_token_windows(tokens, self.prefix_token_id, most, context_len=1):
                context, continuation = make_disjoint_window(pair)
                windows.append((None, context, continuation))
                owners.append(index)
        sums = [0.0] * len(requests)
        for index, (found, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            sums[index] += found
        for request, found in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found)
        return sums

    def get_model_info(self) -> dict[str, Any]:
        """What lm_eval writes into its results beside the arguments."""
        config = self.runtime.config.model_dump(mode="json")
        made_with = provenance(self.runtime.geometry.device)
        return {"hardkv": {"config": config, "usage": asdict(self.usage), **made_with}}

    def _generate(self, contexts: list[str], settings: dict[str, Any], seed: int) -> list[str]:
        room = self.max_length - settings["max_new_tokens"]
        if room < 1:
            raise InputError(
                f"max_gen_toks ({settings['max_new_tokens']}) leaves no room for a context in {self.max_length} tokens"
            )
        prompts = [self.tok_encode(context) or [self.prefix_token_id] for context in contexts]
        self._warn_cut(sum(len(prompt) > room for prompt in prompts))
        generations = self.runtime.generate([prompt[-room:] for prompt in prompts], seed=seed, **settings)
        self._note(len(prompts))
        for generation in generations:
            if generation.error is not None:
                raise HardKVError(generation.error)
        return [generation.text for generation in generations]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [fit((context, tokens), self.max_length, self.prefix_token_id) for _, context, tokens in requests]
        self._warn_cut(sum(len(pair[0]) < len(request[1]) for pair, request in zip(pairs, requests, strict=True)))
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="hardkv: log-likelihood") as bar:
            for runs in plan_calls(plan_runs(pairs, self._decoded_tokens), self._limits):
                rows = self.runtime.teacher_force([run.prompt for run in runs], [run.forced for run in runs])
                self._note(len(runs))
                for run, logprobs in zip(runs, rows, strict=True):
                    for index in run.members:
                        results[index] = score(logprobs, pairs[index][1])
                        if requests[index][0] is not None:
                            self.cache_hook.add_partial("loglikelihood", requests[index][0], results[index])
                    bar.update(len(run.members))
        return results

    def _warn_cut(self, count: int) -> None:
        if count:
            logger.warning("%d contexts do not fit in %d tokens and lose their beginning", count, self.max_length)

    def _note(self, sequences: int) -> None:
        stats, usage = self.runtime.stats(), self.usage
        usage.sequences += sequences
        usage.tokens_seen += stats.tokens_seen
        usage.compressions += stats.compressions
        usage.kv_bytes_peak = max(usage.kv_bytes_peak, stats.kv_bytes_peak)


def _whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    inside = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not inside or (most is not None and value > most):
        bound = f"from {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"model_args: {name}: expected a whole number {bound} (got {value!r})")
    return int(value)
