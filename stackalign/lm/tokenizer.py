"""Text to ids and back, and chat templates: a thin layer over `tokenizers` and Jinja.

Control tokens come from the chat template alone. Text, be it a user's message or a model's answer, that spells one
(`"<|im_end|>"`) is encoded as ordinary text and can't end a turn or open another.

The files of a Hugging Face folder are read as they are: `tokenizer.json`, `tokenizer_config.json`,
`chat_template.jinja`, `generation_config.json`. A GGUF file's tokenizer is written in that form once, in the cache
folder: reading its vocabulary takes seconds.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from stackalign.lm.weights import fetch

Message = Mapping[str, str]  # "role": system, user or assistant; "content"

# Control tokens that end a turn or a text whichever field names them.
_ENDS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<|end_of_turn|>",
    "<end_of_turn>", "</s>",
)  # fmt: skip
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_GGUF_FORMAT = 1  # of the converted folder; a change of the conversion raises it
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


class TokenizerError(ValueError):
    """A tokenizer or chat template that can't be used, or messages that the template refuses."""


@dataclasses.dataclass(frozen=True, eq=False)
class ChatTokenizer:
    """A model's tokenizer with its chat template; made by `load`.

    Attributes:
      eos_ids: every id that ends a turn or the text, ascending.
      end_of_turn: the id that the template puts after an assistant's answer; one of `eos_ids`.
      pad_id: the tokenizer's padding id, which may be one of `eos_ids` (masks must not be derived from it).
      vocab_size: number of ids that mean something; the model may have further rows, which are not to be sampled.
      merges_system: the template has no system role, so a system prompt is put before the first user message. The same
        for every conversation: conversations so changed are those with a system prompt.
    """

    eos_ids: tuple[int, ...]
    end_of_turn: int
    pad_id: int
    vocab_size: int
    merges_system: bool
    _chat: tokenizers.Tokenizer = dataclasses.field(repr=False)
    _plain: tokenizers.Tokenizer = dataclasses.field(repr=False)
    _template: "_Template" = dataclasses.field(repr=False)
    _control: re.Pattern[str] = dataclasses.field(repr=False)

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text: nothing is added, and nothing in it becomes a control token."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, without control tokens."""
        return self._chat.decode([int(index) for index in ids], skip_special_tokens=True)

    def require_rows(self, rows: int, source: Any) -> None:
        """Raises TokenizerError, naming `source`, where an embedding of `rows` rows has none for an id; see `load`."""
        beyond = {index: text for text, index in self._chat.get_vocab(with_added_tokens=True).items() if index >= rows}
        needed = {*self.eos_ids, self.end_of_turn, self.pad_id}
        for index, text in sorted(beyond.items()):
            if index in needed or not self._control.fullmatch(text):
                raise TokenizerError(
                    f"{source}: the tokenizer has {self.vocab_size} ids, the embedding {rows} rows (vocab_size), none "
                    f"for id {index}, {text!r}: take the tokenizer that belongs to the weights"
                )

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as text, with the opening of the assistant's turn; for reading, see `encode_chat` for ids.

        Args:
          messages: at most one of role system, first; then user and assistant turns, of which the last is a user's.

        Raises:
          TokenizerError: messages of another form, or that the template refuses.
        """
        return self._template.render(self._prepare(messages), opening=True)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the rendered conversation; control tokens in them are the template's own. See `render`."""
        messages = self._prepare(messages)
        contents = [message["content"] for message in messages]
        spelled = sorted({text for content in contents for text in self._control.findall(content)})
        if not spelled:
            rendered = self._template.render(messages, opening=True)
            return self._chat.encode(rendered, add_special_tokens=False).ids

        # Control tokens in the contents pass through the template as single private characters that no content has;
        # the template's own are then the only ones to be found, and the text between them is encoded as ordinary text.
        taken = set("".join(contents))
        unused = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in taken)
        escapes = dict(zip(spelled, unused, strict=False))
        restore = str.maketrans({escape: text for text, escape in escapes.items()})
        hidden = [
            {**message, "content": self._control.sub(lambda match: escapes[match[0]], message["content"])}
            for message in messages
        ]
        rendered = self._template.render(hidden, opening=True)
        ids, start = [], 0
        for match in self._control.finditer(rendered):
            ids += self.encode(rendered[start : match.start()].translate(restore))
            ids.append(self._chat.token_to_id(match[0]))
            start = match.end()
        return ids + self.encode(rendered[start:].translate(restore))

    def _prepare(self, messages: Sequence[Message]) -> list[dict[str, str]]:
        prepared = [{"role": message["role"], "content": message["content"]} for message in messages]
        for index, message in enumerate(prepared):
            if message["role"] not in ("system", "user", "assistant") or not isinstance(message["content"], str):
                raise TokenizerError(f"message {index} needs a role, system, user or assistant, and text: {message!r}")
            if message["role"] == "system" and index:
                raise TokenizerError(f"message {index} has role system; only the first may")
        if not prepared or prepared[-1]["role"] != "user":
            raise TokenizerError("the last message must be a user's, for the assistant to answer")
        if self.merges_system and prepared[0]["role"] == "system":
            system, first, *rest = prepared
            if first["role"] != "user":
                raise TokenizerError("the template has no system role, and no user message follows the system prompt")
            prepared = [{"role": "user", "content": f"{system['content']}\n\n{first['content']}"}, *rest]
        return prepared


def load(path: str | os.PathLike[str], *, rows: int | None = None) -> ChatTokenizer:
    """Reads the tokenizer of a Hugging Face folder or a GGUF file.

    A system prompt goes where the template puts it; a template that refuses or drops it has it merged into the first
    user message (`merges_system`). The function `strftime_now`, which some templates use to state today's date, is not
    defined for them, so that the same messages give the same ids on any day: they fall back to their fixed date.

    Args:
      path: a folder with `tokenizer.json`, `tokenizer_config.json` and a chat template (in `chat_template.jinja` or in
        the configuration), or a `.gguf` file with a byte-level BPE vocabulary.
      rows: of the model's embedding (`DecoderConfig.vocab_size`), to be enough for every id that text, the end of a
        turn or padding can have. Control tokens that have no row are no error until a template puts one into a prompt:
        text-only checkpoints keep the image tokens of their family.

    Raises:
      TokenizerError: a missing file, chat template or end-of-turn token, a GGUF vocabulary of another kind, a
        tokenizer that makes control tokens of ordinary text, or one with more ids than rows.
      CheckpointError: a GGUF file that can't be read.
    """
    tokenizer = _load(pathlib.Path(path))
    if rows is not None:
        tokenizer.require_rows(rows, path)
    return tokenizer


def _load(path: pathlib.Path) -> ChatTokenizer:
    if path.is_dir():
        return _load_folder(path)
    if not path.is_file() or path.suffix != ".gguf":
        raise TokenizerError(f"{path}: expected a folder with tokenizer.json, or a .gguf file")
    stat = path.stat()
    stamp = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{_GGUF_FORMAT}"
    kept = fetch.cache_dir() / "tokenizers" / hashlib.sha256(stamp.encode()).hexdigest()[:16]
    if kept.is_dir():
        return _load_folder(kept)
    with tempfile.TemporaryDirectory() as scratch:
        fresh = pathlib.Path(scratch) / "tokenizer"
        _convert_gguf(path, fresh)
        tokenizer = _load_folder(fresh)
        _keep(fresh, kept)
    return tokenizer


_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def save(path: str | os.PathLike[str], folder: pathlib.Path) -> None:
    """Writes the tokenizer of a Hugging Face folder or a GGUF file (see `load`) into a folder, for others to read."""
    path = pathlib.Path(path)
    with tempfile.TemporaryDirectory() as scratch:
        if not path.is_dir():
            _convert_gguf(path, pathlib.Path(scratch) / "tokenizer")
            path = pathlib.Path(scratch) / "tokenizer"
        folder.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            if (path / name).is_file():
                shutil.copyfile(path / name, folder / name)


def _keep(fresh: pathlib.Path, kept: pathlib.Path) -> None:
    """Moves a folder into the cache in one step; a cache that can't be written, or has it by now, is left alone."""
    partial = kept.with_name(f"{kept.name}.{os.getpid()}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(fresh, partial)
        os.rename(partial, kept)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)


def _load_folder(folder: pathlib.Path) -> ChatTokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(
            f"{folder}: no tokenizer.json; transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) makes "
            "one from other formats"
        )
    config = _read_json(folder / "tokenizer_config.json")
    template = _read_template(folder, config)
    specials = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name))) is not None}
    try:
        definition = json.loads(file.read_text(encoding="utf-8"))
        backend = _backend(definition)
        definition.setdefault("added_tokens", [])
    except Exception as error:  # `tokenizers` raises plain Exception
        raise TokenizerError(f"{file}: can't be read: {error}") from error

    vocabulary = backend.get_vocab(with_added_tokens=True)
    vocab_size = max(vocabulary.values()) + 1
    for name, text in specials.items():
        if text not in vocabulary:
            raise TokenizerError(f"{folder}: {name}={text!r} is not in the vocabulary")
    ends = {specials["eos_token"]} if "eos_token" in specials else set()
    ends |= {text for text in _ENDS if text in vocabulary and _is_special(definition, text)}
    end_ids = {vocabulary[text] for text in ends} | _configured_ends(folder)
    if any(index >= vocab_size for index in end_ids):
        raise TokenizerError(f"{folder}: eos_token_id {max(end_ids)} is not in the vocabulary of {vocab_size} ids")

    # Whatever ends a turn is a control token, also where the file's flag says otherwise.
    unmarked = [token for token in definition["added_tokens"] if token["id"] in end_ids and not token["special"]]
    if unmarked:
        for token in unmarked:
            token["special"] = True
        backend = _backend(definition)
    plain = _backend(definition)
    plain.encode_special_tokens = True
    control_tokens = [token for token in definition["added_tokens"] if token["special"]]
    for token_id, text in [(token["id"], token["content"]) for token in control_tokens] + [
        (index, backend.id_to_token(index)) for index in sorted(end_ids)
    ]:
        if token_id in plain.encode(text, add_special_tokens=False).ids:
            raise TokenizerError(
                f"{folder}: id {token_id} is a control or end-of-turn token, but ordinary text, {text!r}, encodes to it"
            )
    control = _control_pattern(control_tokens)

    try:
        chat = _Template(template, specials)
        merges_system = _lacks_system_role(chat)
    except TokenizerError as error:
        raise TokenizerError(f"{folder}: {error}") from error
    end_of_turn = _template_end(chat, control, backend)
    if end_of_turn is None:
        if "eos_token" not in specials:
            raise TokenizerError(f"{folder}: neither the chat template nor an eos_token says what ends a turn")
        end_of_turn = vocabulary[specials["eos_token"]]
    end_ids.add(end_of_turn)
    return ChatTokenizer(
        eos_ids=tuple(sorted(end_ids)),
        end_of_turn=end_of_turn,
        pad_id=vocabulary[specials["pad_token"]] if "pad_token" in specials else end_of_turn,
        vocab_size=vocab_size,
        merges_system=merges_system,
        _chat=backend,
        _plain=plain,
        _template=chat,
        _control=control,
    )


def _backend(definition: Mapping[str, Any]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(definition))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{file}: can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file}: expected a JSON object")
    return value


def _read_template(folder: pathlib.Path, config: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    try:
        template = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{file}: can't be read: {error}") from error
    if isinstance(template, list):  # several named templates
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template and not isinstance(template, str):
        raise TokenizerError(f"{folder / 'tokenizer_config.json'}: chat_template={template!r} is not a text")
    if not template:
        raise TokenizerError(
            f"{folder}: no chat template. A base model has none: put one into chat_template.jinja, in the form that "
            "the model was or shall be trained on"
        )
    return template


def _token_text(entry: Any) -> str | None:
    return entry.get("content") if isinstance(entry, dict) else entry


def _is_special(definition: Mapping[str, Any], text: str) -> bool:
    return any(token["special"] and token["content"] == text for token in definition["added_tokens"])


def _configured_ends(folder: pathlib.Path) -> set[int]:
    """End ids that the model's files state: generation_config.json's where it has them, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        if value is not None:
            ends = value if isinstance(value, list) else [value]
            if not all(type(end) is int and end >= 0 for end in ends):
                raise TokenizerError(f"{folder / name}: eos_token_id={value!r} must be an id or a list of ids")
            return set(ends)
    return set()


def _control_pattern(tokens: Iterable[Mapping[str, Any]]) -> re.Pattern[str]:
    """Matches any control token, the longest where several begin."""
    ordered = sorted((token["content"] for token in tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


class _Opaque(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the assistant's text for training, renders its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Template:
    """A compiled chat template, in the environment that such templates are written for."""

    def __init__(self, source: str, specials: Mapping[str, str]):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Opaque, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _raise_template_error
        self._specials = dict(specials)
        try:
            self._compiled = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template can't be compiled: {error}") from error

    def render(self, messages: Sequence[Message], *, opening: bool) -> str:
        roles = [message["role"] for message in messages]
        try:
            rendered = self._compiled.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=opening, **self._specials
            )
        except Exception as error:  # a template is a program
            raise TokenizerError(f"the chat template refuses messages of the roles {roles}: {error}") from error
        if opening and messages[-1]["content"].strip() not in rendered:
            raise TokenizerError(f"the chat template drops or changes the user's text, last of the roles {roles}")
        return rendered


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


_SYSTEM, _USER, _ASSISTANT = (
    {"role": role, "content": f"probe-{role}-content"} for role in ("system", "user", "assistant")
)


def _lacks_system_role(template: _Template) -> bool:
    if template.render([_USER], opening=True).count(_USER["content"]) != 1:
        raise TokenizerError("the chat template does not put a user message's text into the prompt exactly once")
    try:
        rendered = template.render([_SYSTEM, _USER], opening=True)
        return any(rendered.count(message["content"]) != 1 for message in (_SYSTEM, _USER))
    except TokenizerError:
        return True


def _template_end(template: _Template, control: re.Pattern[str], backend: tokenizers.Tokenizer) -> int | None:
    """The control token that the template puts right after an assistant's text, if any."""
    try:
        rendered = template.render([_USER, _ASSISTANT], opening=False)
    except TokenizerError:
        return None
    match = control.match(rendered.rpartition(_ASSISTANT["content"])[2].lstrip())
    return backend.token_to_id(match[0]) if match else None


def _convert_gguf(file: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes the tokenizer of a GGUF file as a Hugging Face folder.

    The pre-tokenizer is chosen by the file's `tokenizer.ggml.pre`, which decides how digits and blanks are split.
    """
    from stackalign.lm.weights import gguf

    reader = gguf.open_reader(file)
    fields = gguf.read_fields(reader, [key for key in reader.fields if key.startswith("tokenizer.")])
    kind, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    splits = {
        "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "llama-bpe": pre_tokenizers.Sequence([
            pre_tokenizers.Split(tokenizers.Regex(_LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]),
        "smollm": pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]),
    }  # fmt: skip
    if kind != "gpt2" or split not in splits:
        raise TokenizerError(
            f"{file}: tokenizer.ggml.model={kind!r} with tokenizer.ggml.pre={split!r} is not supported; supported: "
            f"'gpt2' with {', '.join(map(repr, splits))}. Use a folder with tokenizer.json"
        )
    missing = [name for name in ("tokens", "token_type", "merges") if f"tokenizer.ggml.{name}" not in fields]
    if missing:
        raise TokenizerError(f"{file}: no field tokenizer.ggml.{missing[0]}")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]],
            ignore_merges=split == "llama-bpe",
        )
    )
    backend.pre_tokenizer = splits[split]
    backend.decoder = decoders.ByteLevel()
    control, user_defined = 3, 4  # of llama.cpp's token types
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (control, user_defined):
            added = tokenizers.AddedToken(token, normalized=False, special=token_type == control)
            (backend.add_special_tokens if added.special else backend.add_tokens)([added])

    def text_of(name: str) -> str | None:
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        return tokens[index] if index is not None else None

    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    config = {f"{ours}_token": text for theirs, ours in names.items() if (text := text_of(theirs)) is not None}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    folder.mkdir(parents=True)
    backend.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": sorted({end for end in ends if end is not None})}), encoding="utf-8"
    )
    if template := fields.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
