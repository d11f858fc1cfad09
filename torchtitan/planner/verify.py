"""The check of the closed form: a step on fake tensors, with every allocation counted."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan import torch_api
from torchtitan.batch import Batch
from torchtitan.debug.dry_run import fake_ranks
from torchtitan.parallel.parallelize import materialise
from torchtitan.planner.tracker import MemoryTracker
from torchtitan.trainer import Trainer, cut_model
from torchtitan.training.engine import Engine
from torchtitan.training.settings import Training
from torchtitan.optim.clipping import Clip
from torchtitan.optim.updates import make_updates


def track(config: Trainer.Config, world_size: int) -> MemoryTracker:
    with fake_ranks(world_size, 0):
        mesh = config.parallelism.build(torch.device("cpu"))
        dtype = Training.compute_dtype(config.training, torch.device("cpu"))
        model = cut_model(config, mesh, dtype, meta=True)
        objective = config.objective.build()
        rows = config.training.global_batch_rows // mesh.dp_world_size
        micro = config.training.micro_batch_rows or rows
        with torch_api.FakeTensorMode(allow_non_fake_inputs=True):
            materialise(model, mesh.device)
            optimizer = config.optimizer.build(model.named_parameters(), [])
            engine = Engine(model, objective, mesh)
            clip = Clip(config.training.max_grad_norm, config.training.clip_by)
            updates = make_updates(optimizer, clip, in_backward=config.optimizer.in_backward)
            def batches():
                out = []
                for _ in range(rows // micro):
                    ids = torch.zeros(micro, config.training.seq_len // mesh.degrees.cp, dtype=torch.int64)
                    out.append({"tokens": ids, "labels": ids, "positions": ids, "document_ids": None})
                return out
            def step(tracker=None):
                phase = tracker.enter_phase if tracker else lambda name: None
                phase("forward")
                handles = mark(model, phase) if tracker else []
                mb = batches()
                totals = engine.totals(mb)
                updates.begin(torch.zeros(()))
                engine.forward_backward(mb, totals)
                updates.clip()
                updates.finish(torch.zeros(()))
                optimizer.zero_grad()
                for h in handles: h.remove()
            step()
            held = [*model.parameters(), *optimizer.state_tensors().values()]
            tracker = MemoryTracker(held)
            with tracker:
                step(tracker)
    return tracker

def mark(model, phase):
    handles=[]
    def on_grad(name):
        def hook(module, args, out):
            out.register_hook(lambda g: phase(name))
        return hook
    blocks=list(model.blocks())
    for i,b in enumerate(blocks):
        handles.append(b.register_forward_hook(on_grad("backward %d"%i)))
    def head(module,args):
        phase("loss")
    handles.append(model.head.register_forward_pre_hook(head))
    def first(module,args):
        args[0].register_hook(lambda g: phase("update"))
    handles.append(blocks[0].register_forward_pre_hook(first))
    return handles
