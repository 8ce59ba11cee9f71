"""TRL's GRPO training step for `bench/trainer.py`, run with the Python of TRL's own environment.

    python bench/trl_step.py MODEL BATCH_JSON FOLDER

Reads a line for each step to make, answers with a JSON line: seconds and peak memory. Only the step is
measured: forward, loss, backward, clipping, AdamW, on completions that are given.
"""

import json
import resource
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

model, batch_file, folder = sys.argv[1:4]
torch.set_num_threads(1)
batch = json.loads(Path(batch_file).read_text())


def pad(rows, left):
    width = max(map(len, rows))
    ids, mask = (
        torch.zeros(len(rows), width, dtype=torch.long),
        torch.zeros(len(rows), width, dtype=torch.long),
    )
    for at, row in enumerate(rows):
        place = slice(width - len(row), None) if left else slice(0, len(row))
        ids[at, place], mask[at, place] = torch.tensor(row), 1
    return ids, mask


config = GRPOConfig(
    output_dir=folder,
    use_cpu=True,
    bf16=False,
    report_to=[],
    per_device_train_batch_size=len(batch),
    num_generations=2,
    beta=0.0,
    gradient_checkpointing=False,
    loss_type="dapo",
    temperature=1.0,
)
trainer = GRPOTrainer(
    model=model,
    reward_funcs=lambda completions, **_: [0.0] * len(completions),
    args=config,
    train_dataset=Dataset.from_list([{"prompt": "a"}] * len(batch)),
    processing_class=PreTrainedTokenizerFast.from_pretrained(model, padding_side="left"),
)
trainer.model.train()
trainer.current_gradient_accumulation_steps = 1
optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
prompt_ids, prompt_mask = pad([row["prompt"] for row in batch], left=True)
completion_ids, completion_mask = pad([row["completion"] for row in batch], left=False)
old, _ = pad([row["completion"] for row in batch], left=False)
old = old.float()
for at, row in enumerate(batch):
    old[at, : len(row["logprobs"])] = torch.tensor(row["logprobs"])
inputs = {
    "prompt_ids": prompt_ids,
    "prompt_mask": prompt_mask,
    "completion_ids": completion_ids,
    "completion_mask": completion_mask,
    "advantages": torch.tensor([row["advantage"] for row in batch]),
    "old_per_token_logps": old,
    "num_items_in_batch": completion_mask.sum(),
}
print(json.dumps({"positions": prompt_ids.numel() + completion_ids.numel()}), flush=True)
for _ in sys.stdin:
    began = time.perf_counter()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    spent = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": spent, "peak_mib": peak, "loss": float(loss.detach())}), flush=True)
