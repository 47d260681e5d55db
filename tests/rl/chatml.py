"""A small tokenizer with the ChatML markers, for tests of prompts."""

from __future__ import annotations

from rl.modeling import train_tokenizer

SOURCE = "import torch\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return {0: x}[0]\n"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chatml_tokenizer(template=CHATML):
    made = train_tokenizer([SOURCE], 400)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.eos_token = "<|im_end|>"
    made.chat_template = template
    return made
