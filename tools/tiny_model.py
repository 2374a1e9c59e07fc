"""Make a tiny random Qwen3 chat model with a fixed seed, for the CPU engine. Run it with the engine's Python.

    PYTHON tools/tiny_model.py [FOLDER]     prints the model's folder (default: in Hearth's cache)

The same weights and tokenizer come out every time; a model that is already there is reused. What it
says is word salad, but at temperature 0 always the same, and exactly as long as `max_tokens` allows.
"""

import hashlib
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

SEED = 20260
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The tokenizer learns from these; they only have to stay the same.
CORPUS = [
    "A supervisor starts the engine, watches it, and says in one line why it died.",
    "The engine answers a question while its prefill graphs are captured piece by piece.",
    "Hello, how are you today? I am fine, thank you. What can I do for you?",
    "One two three four five six seven eight nine ten, eleven twelve thirteen.",
    "When a graph plan fails, step down on the axis that failed, and remember it.",
    "The quick brown fox jumps over the lazy dog, and the dog sleeps by the hearth.",
]


def default_folder() -> Path:
    """A folder in Hearth's cache that is named by this file's content."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hearth"
    base = Path(os.environ.get("HEARTH_CACHE") or base)
    return base / "models" / f"tiny-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]}"


def make_tokenizer(folder: Path) -> list[int]:
    """Train and save a byte-level BPE tokenizer with a chat template; the ids of its readable words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=special, initial_alphabet=sorted(alphabet))
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    return [i for word, i in sorted(fast.get_vocab().items()) if re.fullmatch(r"Ġ[A-Za-z]{2,}", word)]


def make_weights(folder: Path, readable: list[int]) -> None:
    """Save a random Qwen3 of 2 layers, hidden size 64, in float32, that says only `readable` tokens."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=1024,
        max_position_embeddings=8192,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        # Larger than the usual 0.02: the best token then leads by far more than rounding can move it.
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.2)
        mute = torch.ones(config.vocab_size, dtype=torch.bool)
        mute[readable] = False
        model.lm_head.weight[mute] = 0.0
    model.save_pretrained(folder)


def ensure(folder: Path) -> Path:
    """Make the model unless it is there. Built aside and renamed: a half-made one is never seen."""
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".tiny-"))
    try:
        make_weights(aside, make_tokenizer(aside))
        aside.chmod(0o755)
        for file in aside.iterdir():
            file.chmod(0o644)
        aside.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():  # else another process was first, with the same bytes
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


if __name__ == "__main__":
    print(ensure(Path(sys.argv[1]) if len(sys.argv) > 1 else default_folder()))
