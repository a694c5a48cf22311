"""Tokenizers, models and texts of the cases: built here, offline, tiny."""

import random
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

NOUNS = ["river", "stone", "cloud", "lamp", "wheel", "field", "tower", "garden", "engine", "window", "paper", "bridge"]
VERBS = ["moves", "holds", "lights", "turns", "opens", "carries", "follows", "covers", "changes", "meets", "leaves", "keeps"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
)


def sentence(seed: int, words: int) -> str:
    """A sentence of this many words."""
    chance = random.Random(seed)
    return " ".join(chance.choice(NOUNS if index % 2 else VERBS) for index in range(words))


def pairs(count: int = 32, answer: int = 4) -> list[tuple[str, str]]:
    """Questions and answers; answers get longer."""
    return [(f"what {sentence(n, 4)}?", sentence(100 + n, answer + n % 5)) for n in range(count)]


def _byte_pairs(specials: list[str]) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    teacher = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([sentence(n, 12) for n in range(64)], teacher)
    return made


def llama_tokenizer(*, template: str = LLAMA) -> Any:
    """Puts `<s>` at the beginning of every text, as Llama's does; padding is a token of its own."""
    made = _byte_pairs(["<s>", "</s>", "<pad>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)])
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=512
    )
    wrapped.chat_template = template
    return wrapped


def chat_tokenizer() -> Any:
    """ChatML with its own tokens and no BOS, as Qwen's."""
    made = _byte_pairs(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=512,
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    wrapped.chat_template = CHATML
    return wrapped


def gpt_tokenizer(*, pad: bool = True) -> Any:
    """One token for beginning, end and padding, as GPT-2's is used."""
    end = "<|endoftext|>"
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=_byte_pairs([end]), bos_token=end, eos_token=end, unk_token=end, model_max_length=512,
        **({"pad_token": end} if pad else {}),
    )  # fmt: skip


def word_tokenizer() -> Any:
    """Knows whole words only."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *NOUNS, *VERBS, "what", "?"]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_max_length=512,
    )  # fmt: skip


def causal_model(tokenizer: Any, *, vocab: int | None = None) -> Any:
    """A Llama of two thousand parameters per layer."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocab or len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=512, bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
