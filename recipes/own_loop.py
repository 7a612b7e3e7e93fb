"""A loop of your own with adabatch in it, twice: `accumulate` runs the step, or the passive tap only watches yours.

    python recipes/own_loop.py [accumulate|tap]        also: torchrun --nproc-per-node 2 recipes/own_loop.py
"""
import contextlib
import pathlib
import sys
import sysconfig

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import adabatch
from adabatch import distributed


def texts(context=16):  # real data that every machine has: predict a byte of Python's library from the 16 before it
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    windows = torch.tensor(list(b"".join(file.read_bytes() for file in files))).unfold(0, context + 1, 4)
    return torch.utils.data.TensorDataset(windows[:, :-1], windows[:, -1])


def main(layer="accumulate", samples=12_000):
    world, dataset = distributed.start(), texts()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 256))
    model = nn.parallel.DistributedDataParallel(model) if world.size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99))
    controller = adabatch.Controller(
        adabatch.TargetEfficiency(0.5),
        limits=adabatch.BatchLimits(world.size, micro_batch=8, max_batch=1024),
        start_batch=16,
        noise=adabatch.NoiseEstimator(horizon=samples, dataset_size=len(dataset)),
        scaling=adabatch.Scaling("sqrt", reference_batch=16), damping=adabatch.Damping(dwell=800),
        budget=adabatch.Budget(samples=samples), agree=adabatch.agree,
    )
    step = {"accumulate": with_accumulate, "tap": with_passive_tap}[layer]
    stream = adabatch.stream(dataset, seed=0, rank=world.rank, world=world.size, micro_batch=8)
    with stream, adabatch.attach(model, optimizer) as tap:
        while not controller.done:
            plan = controller.plan()
            measurement = step(model, optimizer, tap, plan, stream.take(plan))
            decision = controller.commit(plan, measurement)
            if decision and decision.changed and world.rank == 0:
                print(f"sample {decision.sample:>6,}  loss {measurement.read().loss:.3f}  {decision.reason}")
    distributed.stop()
    return controller


def with_accumulate(model, optimizer, tap, plan, micro_batches):  # synchronises, weighs, clips, skips what is not finite
    with adabatch.accumulate(tap, plan) as window:
        for inputs, targets, samples in ((*micro_batch.data, micro_batch.samples) for micro_batch in micro_batches):
            with window.micro_batch():
                window.backward(cross_entropy(model(inputs), targets), samples=samples)
    outcome = window.finish(optimizer, max_norm=1.0 * plan.scales.clip)
    adabatch.apply(plan, optimizer)
    outcome.step()
    optimizer.zero_grad()
    return outcome.measurement


def with_passive_tap(model, optimizer, tap, plan, micro_batches):  # your own synchronisation, scale and clipping stay
    for number, micro_batch in enumerate(micro_batches, start=1):
        wait = number < plan.micro_batches and plan.world > 1
        with model.no_sync() if wait else contextlib.nullcontext():
            loss = cross_entropy(model(micro_batch.data[0]), micro_batch.data[1])
            (loss * micro_batch.samples * plan.world / plan.global_batch).backward()
        tap.note(micro_batch.samples, loss=loss)
    measurement = tap.read()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0 * plan.scales.clip)
    adabatch.apply(plan, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return measurement


if __name__ == "__main__":
    main(*sys.argv[1:2])
