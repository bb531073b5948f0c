"""The few methods of Transformers' engine that must know of patched models. For all other models they do what they did.

The engine was rebuilt in several versions of Transformers. One that lacks a method, or has it with other parameters, is
refused by name when continuous batching is asked for; everything else works there.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from hf_entmax.generation.serving.reader import PagedReader, ServingPlan, can_sketch
from hf_entmax.generation.serving.step import PagedStep, window_of
from hf_entmax.integration.config_hook import CONFIG_KEY, IMPLEMENTATION, require
from hf_entmax.integration.paged import PagedMask

_ENGINE = "transformers.generation.continuous_batching"
#: Module, class, method and first parameters of all that is hooked or called.
_EXPECTED = [
    ("continuous_api", "ContinuousBatchingManager", "switch_to_cb_friendly_attn", ["self", "model"]),
    ("continuous_api", "ContinuousBatchingManager", "add_request", ["self", "input_ids", "request_id"]),
    ("continuous_api", "ContinuousBatchingManager", "_create_batch_processor", ["self"]),
    ("input_outputs", "ContinuousBatchingIOs", "get_model_kwargs", ["self", "use_padding"]),
    ("requests", "RequestState", "to_generation_output", ["self"]),
    ("offloading_manager", "OffloadingManager", "restore_scheduled_requests", ["self", "requests_in_batch"]),
    ("cache_allocators", "CacheAllocator", "copy_blocks", ["self", "source_block_ids", "dest_block_ids"]),
    (
        "cache",
        "PagedAttentionCache",
        "extend_read_and_write_indices",
        ["self", "request_id", "past_length", "query_length", "read_index", "write_index"],
    ),
    ("scheduler", "Scheduler", "add_waiting_request", ["self", "state"]),
    ("scheduler", "Scheduler", "clear_cancelled_requests", ["self"]),
    *(
        (
            "cache_allocators",
            name,
            "update",
            ["self", "key_states", "value_states", "layer_idx", "read_index", "write_index"],
        )
        for name in ("FullAttentionCacheAllocator", "SlidingAttentionCacheAllocator")
    ),
]
_LAST = "5.23"
HOOKED = "_entmax_hook"
#: Stands in the error of a request that the whole cache could not hold, of which the engine keeps the text alone.
NO_ROOM = "needs room for"
# Where a paged cache, its allocators and the requests in it have what reads it.
_READER = "_entmax_reader"


def problem() -> str | None:
    """Say why continuous batching of patched models does not work with this version of Transformers, or return None."""
    import transformers

    for module, owner, method, parameters in _EXPECTED:
        try:
            found = getattr(importlib.import_module(f"{_ENGINE}.{module}"), owner)
            require(found, method, parameters)
        except (ImportError, AttributeError) as error:
            return (
                f"the engine of Transformers {transformers.__version__} is not the one that hf_entmax was written for, that of "
                f"{_LAST} ({owner}.{method}: {error})"
            )
    return None


def has_server() -> bool:
    """Tell whether the packages of Transformers' server are installed."""
    from transformers.utils.import_utils import is_serve_available

    return is_serve_available()


def state() -> str:
    """Say whether patched models can be served with what is installed."""
    reason = problem()
    if reason is not None:
        return f"no: {reason}"
    return "works" if has_server() else 'generate_batch works; the server needs pip install "hf_entmax[serving]"'


def install() -> None:
    """Hook the engine, once, if it is the expected one; else `refuse_engine` says what differs."""
    if problem() is not None:
        return
    hooks: dict[tuple[str, str, str], Callable[[Any], Any]] = {
        ("continuous_api", "ContinuousBatchingManager", "switch_to_cb_friendly_attn"): _switch,
        ("input_outputs", "ContinuousBatchingIOs", "get_model_kwargs"): _get_model_kwargs,
        ("cache", "PagedAttentionCache", "extend_read_and_write_indices"): _extend_indices,
        ("scheduler", "Scheduler", "add_waiting_request"): _add_waiting_request,
        ("scheduler", "Scheduler", "clear_cancelled_requests"): _clear_cancelled,
        ("continuous_api", "ContinuousBatchingManager", "_create_batch_processor"): _create_batch_processor,
        ("requests", "RequestState", "to_generation_output"): _to_generation_output,
        ("offloading_manager", "OffloadingManager", "restore_scheduled_requests"): _restore_requests,
        ("cache_allocators", "CacheAllocator", "copy_blocks"): _copy_blocks,
    }
    for (module, owner, method), make in hooks.items():
        found = getattr(importlib.import_module(f"{_ENGINE}.{module}"), owner)
        original = getattr(found, method)
        if not hasattr(original, HOOKED):
            hooked = functools.wraps(original)(make(original))
            setattr(hooked, HOOKED, True)
            setattr(found, method, hooked)


def refuse_engine(model: Any) -> None:
    """Raise where this version's engine cannot run a patched model.

    Raises:
        NotImplementedError: naming what differs.
    """
    reason = problem()
    if reason is not None:
        raise NotImplementedError(
            f"{type(model).__name__} is patched with entmax attention, and continuous batching (generate_batch, transformers serve "
            f'--continuous-batching) does not work here: {reason}. Install it with: pip install "transformers=={_LAST}.*", or use '
            "model.generate with a padded batch."
        )


def check_manager(manager: Any) -> None:
    """Raise where a manager was asked for what attention of patched models cannot be part of.

    Raises:
        NotImplementedError: naming the option.
        ValueError: if an option of ``cache_config`` is unknown or not allowed.
    """
    plan_of(manager.generation_config)
    asked = manager.continuous_batching_config
    wrong = None
    if asked.varlen_compile_config is not None or asked.decode_compile_config is not None:
        wrong = "compiled forward passes (varlen_compile_config, decode_compile_config, default_compile_level)"
    elif any(asked.cuda_graph_booleans):
        wrong = "graphs (use_cuda_graph, q_padding_interval_size, kv_padding_interval_size)"
    elif asked.use_async_batching:
        wrong = "use_async_batching=True"
    elif manager.distributed_helper.tp_size > 1:
        wrong = "tensor parallelism"
    if wrong is not None:
        raise NotImplementedError(
            f"Continuous batching of patched models does not take {wrong}: every step has other lengths, which attention reads "
            "on the host. Leave it out."
        )


def _is_patched(config: Any) -> bool:
    return getattr(config, "_attn_implementation", None) == IMPLEMENTATION


def patched_anywhere(model: Any) -> bool:
    """Tell whether a model's decoder, or all of it, is patched."""
    configs = (model.config, model.config.get_text_config())
    return any(getattr(config, CONFIG_KEY, None) is not None or _is_patched(config) for config in configs)


def _switch(original: Callable[..., Any]) -> Callable[..., Any]:
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        # It knows names of softmax implementations alone, and would set another one.
        return None if patched_anywhere(model) else original(self, model, *args, **kwargs)

    return switch_to_cb_friendly_attn


def _get_model_kwargs(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_model_kwargs(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        if _is_patched(self.config):
            reader: PagedReader = getattr(self.cache, _READER)
            for future in self.requests_in_batch:
                setattr(future.state, _READER, reader)
            step = PagedStep(self.cache, reader, self.requests_in_batch, found["write_index"])
            masks = {
                kind: PagedMask(step, (1, 1, self.num_q_tokens, length), self.model_dtype, self.device)
                for kind, length in self.total_seqlen_k.items()
            }
            # As the engine hands over its own: models with one kind of layer expect no dict.
            found["attention_mask"] = masks if len(masks) > 1 else next(iter(masks.values()))
            found["is_causal"] = False
        return found

    return get_model_kwargs


def _extend_indices(original: Callable[..., Any]) -> Callable[..., Any]:
    def extend_read_and_write_indices(
        self: Any, request_id: str, past_length: int, query_length: int, read_index: Any, write_index: Any
    ) -> None:
        # Where to read is known from the tables of blocks: a number for every key of every request is not written out.
        wanted = None if _is_patched(self.config) else read_index
        original(self, request_id, past_length, query_length, wanted, write_index)

    return extend_read_and_write_indices


def _create_batch_processor(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_batch_processor(self: Any) -> Any:
        processor = original(self)
        cache = processor.cache
        if _is_patched(cache.config) and not hasattr(cache, _READER):
            reader = PagedReader(cache, plan_of(self.generation_config))
            for holder in (cache, *cache.cache_allocators.values()):
                setattr(holder, _READER, reader)
        return processor

    return create_batch_processor


def plan_of(generation_config: Any) -> ServingPlan:
    """Return what ``cache_config`` of a generation configuration asks for.

    Raises:
        ValueError: if an option is unknown or not allowed.
    """
    options = generation_config.cache_config or {}
    try:
        return ServingPlan(**options)
    except TypeError as error:
        raise ValueError(
            f"cache_config={options!r} does not fit continuous batching of patched models ({error}): it takes bits, verify and "
            "shortest."
        ) from error


def certificate_of(manager: Any) -> Any:
    """Return what a manager's requests read and proved, all together."""
    processor = manager.batch_processor
    if processor is None:
        raise ValueError(
            "This manager has no cache: start it, and ask before it is stopped (or keep it for the next session)."
        )
    return getattr(processor.cache, _READER).certificate()


def _to_generation_output(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_generation_output(self: Any) -> Any:
        output = original(self)
        reader: PagedReader | None = getattr(self, _READER, None)
        if reader is not None and output.is_finished():
            output.certificate = reader.finish(self.request_id)
        return output

    return to_generation_output


def _clear_cancelled(original: Callable[..., Any]) -> Callable[..., Any]:
    def clear_cancelled_requests(self: Any) -> Any:
        cancelled = original(self)
        reader: PagedReader | None = getattr(self.cache, _READER, None)
        if reader is not None:
            for state in cancelled:
                reader.finish(state.request_id)
        return cancelled

    return clear_cancelled_requests


def _restore_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    def restore_scheduled_requests(self: Any, requests_in_batch: Any) -> Any:
        reader: PagedReader | None = getattr(self.cache, _READER, None)
        back = [future.state.request_id for future in requests_in_batch if future.state.is_cpu_offloaded]
        if reader is not None and back:
            for allocator in self.cache.cache_allocators.values():
                for name in back:
                    _forget(reader, allocator, allocator.block_table.get(name, []))
        return original(self, requests_in_batch)

    return restore_scheduled_requests


def _copy_blocks(original: Callable[..., Any]) -> Callable[..., Any]:
    def copy_blocks(self: Any, source_block_ids: list[int], dest_block_ids: list[int]) -> Any:
        reader: PagedReader | None = getattr(self, _READER, None)
        if reader is not None:
            _forget(reader, self, dest_block_ids)
        return original(self, source_block_ids, dest_block_ids)

    return copy_blocks


def _forget(reader: PagedReader, allocator: Any, blocks: list[int]) -> None:
    if window_of(allocator) is None and can_sketch(allocator.tokens_per_page) and blocks:
        reader.forget_blocks(allocator, blocks)


def _add_waiting_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_waiting_request(self: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_patched(self.cache.config):
            check_room(self.cache, state)
        return original(self, state, *args, **kwargs)

    return add_waiting_request


def check_room(cache: Any, state: Any) -> None:
    """Refuse a request that the cache cannot hold when it has it to itself: the engine would stop for all others.

    Raises:
        ValueError: naming the numbers.
    """
    new = state.max_new_tokens
    # The last token is handed out, not stored.
    needed = len(state.initial_tokens) + (0 if new is None else max(0, new - 1))
    if sectors_needed(cache, needed) > cache.num_sectors:
        raise ValueError(
            f"Request {state.request_id} {NO_ROOM} {needed} tokens ({len(state.initial_tokens)} of its prompt and up to "
            f"{new} new ones), and the cache holds {capacity(cache)} in all: send a shorter prompt, ask for fewer new tokens, or "
            "serve with more num_blocks."
        )


def sectors_needed(cache: Any, tokens: int) -> int:
    """Sectors of the cache that one request of so many tokens takes."""
    total = 0
    for allocator in cache.cache_allocators.values():
        held = min(tokens, getattr(allocator, "sliding_window", tokens))
        blocks = -(-held // allocator.tokens_per_page)
        total += -(-blocks // allocator.blocks_per_sector)
    return total


def capacity(cache: Any) -> int:
    """Return the most tokens that one request can have."""
    low, high = 0, cache.max_tokens_read
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sectors_needed(cache, middle) <= cache.num_sectors else (low, middle - 1)
    return low
