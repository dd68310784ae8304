"""Facts of a GPU: its properties, copy bandwidth, kernel times, and the minimum reads of a decode
step."""

from pathlib import Path

import workload

COPIED = 2**32  # bytes: far more than any cache holds


def device_facts() -> dict | None:
    """Return {fact: value} of the first GPU, such as its name and memory, or `None` without one."""
    import torch

    from vanilla_transformer_export.inference import devices

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    gpus = devices.gpus()
    return {
        "gpu": ", ".join(gpus[0]) if gpus else properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "gpu_l2_bytes": properties.L2_cache_size,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def copy_bandwidth(device: str, quick: bool) -> float:
    """Return the bytes per second, read plus written, of a large copy on `device`.

    With `quick` the copy is small.
    """
    import torch

    source = torch.ones(COPIED >> (12 if quick else 0), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy():
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()

    return 2 * source.nbytes / workload.median_seconds(copy, 10)


def device_seconds(run) -> dict:
    """Call `run` and return {"kernel_seconds": …, "copy_seconds": …}, the time on the device.

    Copies are from, to and on the device.

    Raises:
        RuntimeError: without a GPU, and where the profiler sees no kernel.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        raise RuntimeError("found no GPU, expected one to profile")
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    # As they were recorded: `profiler.events()` would take seconds to order tens of thousands of
    # them.
    events = profiler.profiler.kineto_results.events()
    return totals(
        event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA
    )


def totals(events) -> dict:
    """Return {"kernel_seconds": …, "copy_seconds": …} of the profiler's `events`.

    Copies are CUDA's Memcpy and Memset.

    Raises:
        RuntimeError: without an event of a kernel.
    """
    seconds = {"kernel_seconds": 0.0, "copy_seconds": 0.0}
    for event in events:
        if not event.is_user_annotation():
            name = (
                "copy_seconds"
                if event.name().startswith(("Memcpy", "Memset"))
                else "kernel_seconds"
            )
            seconds[name] += event.duration_ns() / 1e9
    if not seconds["kernel_seconds"]:
        raise RuntimeError("the profiler recorded no kernel, expected at least one")
    return seconds


def step_values(kind: str, root: Path) -> dict:
    """Return how many numbers a decode step of the model `kind` in `root` reads.

    `weights` are read once, `per_token` for each row and earlier token, `per_source` for each row
    and source token. Rows of the embedding are not counted.
    """
    import torch

    import vanilla_transformer

    model_class = getattr(vanilla_transformer, workload.OURS[kind])
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_pretrained(root / "vanilla"))
    decoder = model.get_decoder()
    layers, cross = cached(layer.self_attn for layer in decoder.layers), []
    if model.config.is_encoder_decoder:
        cross = cached(layer.cross_attn for layer in decoder.layers)
    modules = (decoder.layers, decoder.norm, model.lm_head)
    weights = sum(weight.numel() for module in modules for weight in module.parameters())
    computed_before = sum(
        weight.numel() for projection in cross for weight in projection.parameters()
    )
    per_token, per_source = (
        sum(projection.out_features for projection in projections)
        for projections in (layers, cross)
    )
    return {"weights": weights - computed_before, "per_token": per_token, "per_source": per_source}


def cached(attentions):
    """Return the linear maps of these attention modules whose outputs are cached: keys and
    values."""
    return [
        projection
        for attention in attentions
        for projection in (attention.k_proj, attention.v_proj)
    ]


def step_bytes(values: dict, record: dict, size: int) -> float:
    """Return the bytes that the average step after the first reads, with numbers of `size` bytes.

    `values` are those of `step_values`, and `record` has batch, length and new_tokens of the cell.
    """
    prompt = record["length"] if values["per_source"] == 0 else 1
    before = (
        values["per_token"] * (prompt + record["new_tokens"] / 2)
        + values["per_source"] * record["length"]
    )
    return size * (values["weights"] + record["batch"] * before)
