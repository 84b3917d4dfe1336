"""GGUF files in engines: a user gives the file alone, and gets the tokens of the weights that the file stands for."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BUNDLED_MODEL, engine
from greedy import expected, generate
from huggingface_hub import constants, file_download
from lane import HAS_OPENXLA
from test_quantised_models import PROMPTS, check, config_of
from test_reload import reload_weights
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from model_runner_base.errors import CheckpointError, UnsupportedConfigError
from model_runner_base.testing.architectures import UNTIED, hf
from model_runner_base.testing.drafts import speculation
from model_runner_base.testing.gguf_files import write_gguf
from model_runner_base.testing.models import TinyModel, vary

gguf = pytest.importorskip("gguf")

Make = Callable[[str], TinyModel]
TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32"]


def every_type(name: str) -> str:
    """A type by a tensor's name, so that a file has all of them."""
    return TYPES[sum(name.encode()) % len(TYPES)]


def k_quants(name: str) -> str:
    return "Q6_K" if "ffn_down" in name or name == "output.weight" else "Q4_K"


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen2-moe", "qwen3-moe", "gemma2", "phi3"])
def test_first_load(name: str, tiny_model: Make, tmp_path: Path) -> None:
    """The file's own metadata is the config; blocks are of all types that the package gguf packs."""
    model = tiny_model(name)
    path, plain = write_gguf(model, tmp_path, every_type)
    assert expected(plain, PROMPTS) != expected(model, PROMPTS)  # Else this test would show nothing.
    with engine(path, max_model_len=128, enforce_eager=True) as llm:
        check(llm, plain)
        assert llm.llm_engine.vllm_config.model_config.served_model_name == str(path)


def test_k_quants(tmp_path: Path) -> None:
    """Blocks of 256 numbers as most files have them, packed here by the format's definition; llama.cpp's rotary order.

    The reference is a plain checkpoint, and transformers' own reading of the file.
    """
    torch.manual_seed(0)
    wide = UNTIED | {"hidden_size": 256, "intermediate_size": 512}
    made = AutoModelForCausalLM.from_config(hf.LlamaConfig(**wide, rope_theta=5000.0))
    for name, tensor in made.named_parameters():
        vary(name, tensor)
    made.save_pretrained(tmp_path / "model")
    path, plain = write_gguf(TinyModel(tmp_path / "model"), tmp_path / "file", k_quants)
    with engine(path, max_model_len=128, enforce_eager=True) as llm:
        check(llm, plain)
    other = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=made)["tensors"]
    for name, tensor in AutoModelForCausalLM.from_pretrained(plain.path).state_dict().items():
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-6)


def test_gemma_3(tmp_path: Path) -> None:
    """Layers in llama.cpp's order, a full one after five with a window, with the metadata alone."""
    torch.manual_seed(0)
    sizes = UNTIED | {"num_hidden_layers": 6}
    made = AutoModelForCausalLM.from_config(
        hf.Gemma3TextConfig(**sizes, head_dim=32, sliding_window=16, query_pre_attn_scalar=32)
    )
    for name, tensor in made.named_parameters():
        vary(name, tensor)
    made.save_pretrained(tmp_path / "model")
    path, plain = write_gguf(TinyModel(tmp_path / "model"), tmp_path / "file", every_type)
    with engine(path, max_model_len=128, enforce_eager=True) as llm:
        check(llm, plain)


def test_a_named_config(tiny_model: Make, tmp_path: Path) -> None:
    """Gemma 3 with layers in another order than llama.cpp's: the user names the config."""
    path, plain = write_gguf(tiny_model("gemma3"), tmp_path, every_type)
    with engine(path, hf_config_path=str(plain.path), max_model_len=128, enforce_eager=True) as llm:
        check(llm, plain)


def test_later_loads_and_a_draft(tiny_model: Make, tmp_path: Path) -> None:
    """An engine reads a plain checkpoint, then a file, then the first again; its draft is a file too."""
    model = tiny_model("llama")
    path, plain = write_gguf(model, tmp_path / "one")
    drafts = speculation("same", model)
    draft, _ = write_gguf(TinyModel(Path(drafts["model"])), tmp_path / "draft")
    options: dict[str, Any] = {"speculative_config": drafts | {"model": str(draft)}}
    with engine(path, max_model_len=128, enforce_eager=True, **options) as llm:
        assert generate(llm, PROMPTS) == expected(plain, PROMPTS)
    with engine(model.path, max_model_len=128, enforce_eager=True) as llm:
        reload_weights(llm, weights_path=str(path))
        check(llm, plain)
        reload_weights(llm, weights_path=str(model.path))
        assert generate(llm, PROMPTS) == expected(model, PROMPTS)
        torn = tmp_path / "torn.gguf"
        torn.write_bytes(path.read_bytes()[:-4000])
        with pytest.raises(CheckpointError, match=r"cut off in or before .*\.weight.*the model keeps its weights"):
            reload_weights(llm, weights_path=str(torn))
        assert generate(llm, PROMPTS) == expected(model, PROMPTS)


def test_text(tmp_path: Path) -> None:
    """The file's tokenizer encodes as the model's own; the transformers of vLLM 0.16 read another one, and it is
    refused."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)

    def vocabulary(writer: Any, architecture: str) -> None:
        model = json.loads((Path(BUNDLED_MODEL) / "tokenizer.json").read_text())["model"]
        tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
        special = set(tokenizer.all_special_tokens)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in special else 1 for token in tokens])
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
        writer.add_bos_token_id(tokenizer.bos_token_id)
        writer.add_eos_token_id(tokenizer.eos_token_id)

    path, _ = write_gguf(TinyModel(Path(BUNDLED_MODEL)), tmp_path, lambda name: "BF16", vocabulary)
    if HAS_OPENXLA:
        with pytest.raises(UnsupportedConfigError, match=r"needs transformers 5.*: set tokenizer to the model"):
            config_of(path)
        return
    config = config_of(path)
    found = AutoTokenizer.from_pretrained(config.model_config.tokenizer)
    assert (found.bos_token_id, found.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    ends = f"The end.{tokenizer.eos_token}In 12345"
    for text in ("In the beginning God created the heaven and the earth.", "And 12 men, saying: \u00e9!\n Amen", ends):
        assert found.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)
    assert config.model_config.dtype == torch.bfloat16


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """Writes a file again, after a change of its metadata and its tensors by name."""
    reader = gguf.GGUFReader(path)
    fields = {n: f.contents() for n, f in reader.fields.items() if not n.startswith(("GGUF.", "general."))}
    tensors = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    fields["architecture"] = reader.fields["general.architecture"].contents()
    change(fields, tensors)
    new = path.with_name("changed.gguf")
    writer = gguf.GGUFWriter(new, fields.pop("architecture"))
    for name, value in fields.items():
        add = {str: writer.add_string, float: writer.add_float32}.get(type(value), writer.add_uint32)
        add(name, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return new


FAULTS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "a tensor is missing": (
        lambda fields, tensors: tensors.pop("blk.1.ffn_up.weight"),
        r"blk\.1\.ffn_up\.weight is missing, which is model\.layers\.1\.mlp\.up_proj\.weight",
    ),
    "a tensor of another model": (
        lambda fields, tensors: tensors.update({"blk.0.attn_q.bias": tensors["output_norm.weight"]}),
        r"blk\.0\.attn_q\.bias has no place in a model of type llama",
    ),
    "another shape": (
        lambda fields, tensors: tensors.update({"output_norm.weight": (np.ones(32, np.float32), 0)}),
        r"output_norm\.weight has shape \[32\], and the config asks for \[64\]",
    ),
    "numbers that are not dequantised": (
        lambda fields, tensors: tensors.update({"output_norm.weight": (np.ones(64, np.int32), 26)}),
        r"output_norm\.weight of .* has numbers of type I32",
    ),
    "an unknown architecture": (
        lambda fields, tensors: fields.update(architecture="falcon"),
        "GGUF files of architecture falcon are not read, only those of llama, ",
    ),
    "experts under the name of Llama": (
        lambda fields, tensors: fields.update({"llama.expert_count": 8}),
        r"llama\.expert_count of .* is not understood: name the model",
    ),
    "positions of another kind": (
        lambda fields, tensors: tensors.update({"rope_freqs.weight": (np.linspace(1, 3, 8).astype(np.float32), 0)}),
        r"rope_freqs\.weight of .* is not understood",
    ),
    "one part of several": (
        lambda fields, tensors: fields.update({"split.count": 2}),
        "is one of several files: merge them by llama-gguf-split",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_before_an_engine_starts(fault: str, tiny_model: Make, tmp_path: Path) -> None:
    path, _ = write_gguf(tiny_model("llama"), tmp_path)
    change, message = FAULTS[fault]
    with pytest.raises(ValueError, match=message):
        config_of(rewrite(path, change), skip_tokenizer_init=True)


def test_damaged_files(tiny_model: Make, tmp_path: Path) -> None:
    path, _ = write_gguf(tiny_model("llama"), tmp_path)
    whole = path.read_bytes()
    # A name is followed by the number of dimensions, these, and the type.
    place = whole.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 2 * 8
    coded = whole[:place] + b"\xff" + whole[place + 1 :]
    assert config_of(path, skip_tokenizer_init=True).quant_config is None
    assert config_of(path, skip_tokenizer_init=True, load_format="gguf").load_config.load_format == "auto"
    with pytest.raises(
        ValueError, match=r"the tokenizer in .* (cannot be read|needs transformers 5).*: set tokenizer to the model"
    ):
        config_of(path)
    for name, (content, message) in {
        "cut.gguf": (whole[:-4000], r"cut\.gguf is cut off in or before .*\.weight: copy the file again"),
        "header.gguf": (whole[:700], r"header\.gguf is no GGUF file, or cut off in its header"),
        "empty.gguf": (b"", "is no GGUF file, or cut off in its header"),
        "other.gguf": (b"x" * 4000, "is no GGUF file, or cut off in its header"),
        "code.gguf": (coded, r"blk\.0\.attn_q\.weight is of type 255, which the installed package gguf does not know"),
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            config_of(tmp_path / name, skip_tokenizer_init=True)
    with pytest.raises(ValueError, match=r"there is no file /nowhere/model\.gguf: name a GGUF file"):
        config_of("/nowhere/model.gguf")
    with pytest.raises(ValueError, match=r"names a type of numbers, not a file: .* as a/b/<file>\.gguf"):
        config_of("a/b:Q4_K_M")


def test_positions_of_llama_3(tiny_model: Make, tmp_path: Path) -> None:
    """Files of Llama 3.1 and later hold the factors of their positions alone."""
    model = tiny_model("llama")
    lengths = 2 * np.pi * 10000.0 ** (np.arange(0, 16, 2) / 16)
    factors = []
    for length in lengths:  # As llama.cpp's converter computes them.
        if length < 8192 / 4:
            factors.append(1.0)
        elif length > 8192 / 1:
            factors.append(32.0)
        else:
            smooth = (8192 / length - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / 32 + smooth))
    tensor = {"rope_freqs.weight": (np.array(factors, np.float32), 0)}
    path = rewrite(write_gguf(model, tmp_path)[0], lambda fields, tensors: tensors.update(tensor))
    found = config_of(path, skip_tokenizer_init=True).model_config.hf_config
    scaling = getattr(found, "rope_parameters", None) or found.rope_scaling
    assert scaling["rope_type"] == "llama3" and scaling["factor"] == 32.0


@contextmanager
def gated_hub(file: Path, token: str) -> Iterator[str]:
    """A hub on this machine, whose one file is given only to those who show the token."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers["Authorization"] == f"Bearer {token}"
            there = self.path.startswith("/owner/repository/resolve/") and self.path.endswith(file.name)
            content = file.read_bytes() if allowed and there else b""
            self.send_response(200 if content else 404 if allowed else 401)
            self.send_header("ETag", '"1"')
            self.send_header("X-Repo-Commit", "c" * 40)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_gated_file(tiny_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a gated repository is fetched with vLLM's hf_token, into vLLM's download_dir."""
    path, _ = write_gguf(tiny_model("llama"), tmp_path)
    folder = tmp_path / "downloads"
    options: dict[str, Any] = {"skip_tokenizer_init": True, "download_dir": str(folder)}
    name = f"owner/repository/{path.name}"
    with gated_hub(path, "secret") as endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for module in (constants, file_download):  # Older releases of the package copy it.
            template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        with pytest.raises(ValueError, match=f"there is no file {name}, and the hub gives none"):
            config_of(name, **options)
        config = config_of(name, hf_token="secret", **options)
    assert config.model_config.served_model_name == name
    assert [found.read_bytes() for found in folder.rglob("*.gguf")] == [path.read_bytes()]
