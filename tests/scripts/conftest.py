"""A folder as the hub has them, for scripts that fine-tune one."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a tokenizer; beside it data.txt and, in data.jsonl, prompts and completions of any length."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = tmp_path_factory.mktemp("model")
    (made / "data.txt").write_text(text := Path(textwrap.__file__).read_text())
    lines = [{"prompt": text[i : i + i % 67], "completion": text[i : i + 9]} for i in range(0, 9000, 45)]
    (made / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens.train_from_iterator(
        [text],
        trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>", "<mask>"], initial_alphabet=alphabet),
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token="</s>", mask_token="<mask>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(made)
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=304, tie_word_embeddings=True, **size)
    transformers.LlamaForCausalLM(config).save_pretrained(made)
    return made
