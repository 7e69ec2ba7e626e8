"""Training over a stream: what a batch holds, the memory between steps, checkpoints, one process and two."""

import json
from pathlib import Path

import pytest
import torch
from ddp_train import Toy
from launching import run_python
from stream_train import LENGTH, ROWS, SAVED, STEPS, both, documents, make_model, run
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from hf_relpos.training.stream import SegmentDataset, StreamTrainer


def test_batches_continue_each_other():
    """Rows read over all batches are the stream; a label is the next token, but for the last of a document."""
    texts = documents()
    dataset = SegmentDataset(texts, ROWS, LENGTH)
    batches = list(DataLoader(dataset, batch_size=ROWS))
    assert len(batches) == dataset.steps == -(-(sum(map(len, texts)) // ROWS) // LENGTH)
    read = {key: torch.cat([batch[key] for batch in batches], dim=1) for key in batches[0]}
    stream = [token for text in texts for token in text]
    count = read["input_ids"].shape[1]
    assert count == len(stream) // ROWS
    assert read["input_ids"].flatten().tolist() == stream[: ROWS * count]
    ends, position, place = set(), [], 0
    for text in texts:
        place += len(text)
        ends.add(place - 1)
        position.extend(range(len(text)))
    for row in range(ROWS):
        for column in range(count):
            at = row * count + column
            assert read["labels"][row, column] == (-100 if at in ends else stream[at + 1])
            assert read["position_ids"][row, column] == min(position[at], column)
    assert torch.equal(read["labels"], read["shift_labels"])
    assert set(SegmentDataset(texts, ROWS, LENGTH, next_token=False)[0]) == {"input_ids", "position_ids"}


def test_losses_are_those_of_the_documents(tmp_path):
    """Without a step of training: the mean over all batches is that over documents read whole, memory being long."""
    texts = documents([31, 7, 40, 1, 12])
    model = make_model(memory_length=60).eval()
    dataset = SegmentDataset(texts, 1, LENGTH)
    trainer = StreamTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(tmp_path), per_device_eval_batch_size=1, report_to="none", use_cpu=True, disable_tqdm=True
        ),
    )
    summed = 0.0
    with torch.no_grad():
        for item in DataLoader(dataset, batch_size=1):
            one = torch.tensor(1)  # the sum in place of the mean
            summed += trainer.compute_loss(model, item, num_items_in_batch=one).item()
        expected = sum(
            model(torch.tensor([text]), labels=torch.tensor([text]), num_items_in_batch=torch.tensor(1)).loss.item()
            for text in texts
            if len(text) > 1
        )
    assert summed == pytest.approx(expected, rel=1e-5)


def test_resume_gives_the_same_curve(tmp_path):
    """With dropout; the checkpoint lies between two segments of the same documents."""
    whole, trainer = run(tmp_path / "whole", ROWS, dropout=0.1)
    checkpoint = tmp_path / "whole" / f"checkpoint-{SAVED}"
    assert len(whole) == STEPS
    rest, again = run(tmp_path / "again", ROWS, resume=checkpoint, dropout=0.1)
    assert rest == whole[SAVED:]
    for one, other in zip(trainer.memories["train"].states, again.memories["train"].states, strict=True):
        assert torch.equal(one, other)
    (checkpoint / "memory-0-of-1.safetensors").unlink()
    without, _ = run(tmp_path / "without", ROWS, resume=checkpoint, dropout=0.1)
    assert without[0] != whole[SAVED]  # it is the memory that makes them equal


@pytest.mark.slow
def test_memory_matters_in_training(tmp_path):
    with_memory, _ = run(tmp_path, ROWS)
    without, _ = run(tmp_path, ROWS, model=make_model(memory_length=1))
    assert with_memory[0] == without[0]
    assert all(one != other for one, other in zip(with_memory[1:], without[1:], strict=True))


def test_accumulated_gradients_and_epochs(tmp_path):
    """Two segments for each step, and over the end of the stream, where all rows begin anew."""
    losses, trainer = run(
        tmp_path, ROWS, gradient_accumulation_steps=2, max_steps=-1, num_train_epochs=2, save_strategy="no"
    )
    assert trainer.state.global_step == len(losses) == 2 * -(-trainer.train_dataset.steps // 2)
    assert losses[-1] < losses[0]


def test_gradient_checkpointing_gives_the_same_curve(tmp_path):
    plain, _ = run(tmp_path, ROWS, max_steps=4)
    saved, _ = run(tmp_path, ROWS, max_steps=4, gradient_checkpointing=True)
    assert saved == pytest.approx(plain, abs=1e-5)


def test_evaluation_has_a_memory_of_its_own(tmp_path):
    plain, _ = run(tmp_path, ROWS)
    evaluated, trainer = run(tmp_path, ROWS, eval_strategy="steps", eval_steps=2)
    assert evaluated == plain
    assert trainer.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize(
    "texts, rows, length, message",
    [
        ([[1, 2], []], 1, 4, r"documents\[1\]"),
        ([[1, 2]], 3, 4, "2 tokens, too few for rows = 3"),
        ([[1, 2]], 0, 4, "rows = 0"),
        ([[1, 2]], 1, 0, "segment_length = 0"),
        ([[[1, 2]]], 1, 4, r"shape \(1, 2\)"),
    ],
    ids=str,
)
def test_data_refused(texts, rows, length, message):
    with pytest.raises(ValueError, match=message):
        SegmentDataset(texts, rows, length)


def test_runs_refused(tmp_path):
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=3, report_to="none", use_cpu=True
    )
    dataset = SegmentDataset(documents(), ROWS, LENGTH)
    with pytest.raises(ValueError, match="rows = 4; 1 processes with per_device_train_batch_size = 3 read 3 rows"):
        StreamTrainer(model=make_model(), args=arguments, train_dataset=dataset)
    with pytest.raises(ValueError, match="train_dataset is a Toy"):
        StreamTrainer(model=make_model(), args=arguments, train_dataset=Toy("next"))
    with pytest.raises(ValueError, match="memory_length = 0"):
        StreamTrainer(model=make_model(memory_length=0), args=arguments)


def test_resume_with_another_number_of_processes(tmp_path):
    run(tmp_path / "whole", ROWS)
    checkpoint = tmp_path / "whole" / f"checkpoint-{SAVED}"
    file = checkpoint / "memory-0-of-1.safetensors"
    file.rename(file.with_name("memory-0-of-2.safetensors"))
    with pytest.raises(ValueError, match=r"memory-0-of-2\.safetensors, and this is process 0 of 1"):
        run(tmp_path / "again", ROWS, resume=checkpoint)


@pytest.mark.slow
def test_two_processes_give_the_curve_of_one(tmp_path):
    """DistributedDataParallel by `accelerate launch`, half the rows on each side, resumed in the middle too."""
    out = tmp_path / "losses.json"
    run_python(Path(__file__).with_name("stream_train.py"), out, tmp_path / "two", ROWS // 2, processes=2)
    two = json.loads(out.read_text())
    one = both(tmp_path / "one", ROWS)
    assert (one["processes"], two["processes"]) == (1, 2)
    assert one["kept"] == ["memory-0-of-1.safetensors"]
    assert two["kept"] == ["memory-0-of-2.safetensors", "memory-1-of-2.safetensors"]
    assert one["resumed"] == one["losses"][SAVED:] and two["resumed"] == two["losses"][SAVED:]
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-5)
    assert two["eval"][0] == two["eval"][1] and one["eval"][0] == one["eval"][1]
    assert two["eval"][0] == pytest.approx(one["eval"][0], abs=1e-5)
