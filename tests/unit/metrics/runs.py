from torchtitan.metrics import RunInfo

RUN = RunInfo(
    recipe="llama3_debugmodel",
    config={"training": {"seq_len": 8}},
    total_steps=25,
    tokens_per_step_global=64,
    flops_per_token=6e6,
    world_size=1,
    rank=0,
    device_type="cpu",
    device_name="cpu",
    compute_dtype="float32",
    n_params=1_000,
    start_step=0,
)
