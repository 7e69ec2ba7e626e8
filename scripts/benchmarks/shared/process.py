"""What a benchmark of models does to its process before it begins."""

import torch
from transformers.utils import logging


def start_quietly(threads: int) -> None:
    """Use this many threads, and leave Transformers' progress bars and warnings out of what the experiment prints."""
    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
