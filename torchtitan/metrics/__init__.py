from torchtitan.metrics.metrics import Metrics
from torchtitan.metrics.probes import Probe, WeightNorm
from torchtitan.metrics.run_info import RunInfo
from torchtitan.metrics.sinks.base import GeneratedText, Row, Sink
from torchtitan.metrics.sinks.console import Console
from torchtitan.metrics.sinks.jsonl import Jsonl, read_rows
from torchtitan.metrics.sinks.plots import Plots
from torchtitan.metrics.sinks.tensorboard import TensorBoard
from torchtitan.metrics.sinks.wandb import WandB

__all__ = [
    "Console",
    "GeneratedText",
    "Jsonl",
    "Metrics",
    "Plots",
    "Probe",
    "Row",
    "RunInfo",
    "Sink",
    "TensorBoard",
    "WandB",
    "WeightNorm",
    "read_rows",
]
