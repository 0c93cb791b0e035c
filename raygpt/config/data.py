"""`data`: the text, how it is tokenised, and which part is held out for validation."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from raygpt.config.parts import SEEDS, Integer, May, Number, Part, refuse_credentials, shown

MIN_BPE = 258  # 256 bytes, end of text and one merge
MAX_BPE = 1_000_000  # the largest vocabularies in use; an embedding of so many takes gigabytes


class Source(Part):
    """One text of a mixture."""

    source: str = Field(min_length=1, description="A name or path, as in data.source.")
    weight: Number = Field(gt=0, description="How many of the windows come from it, relative to the other weights.")


def _one_or_mixture(source: object) -> str:
    return "mixture" if isinstance(source, list | tuple) else "one"


def _share_or_source(val: object) -> object:
    """'0.05' -> 0.05; text that is not a number is a source."""
    try:
        share = float(str(val))
    except ValueError:
        if isinstance(val, str) and val:
            return val
        share = 0.0
    if not 0 < share < 1:
        raise ValueError(f"data.val: {shown(val)} is not a fraction between 0 and 1; write e.g. data.val: 0.05")
    return share


class Data(Part):
    """The text, how it is tokenised, and which part is held out for validation."""

    source: Annotated[
        Annotated[str, Field(min_length=1), Tag("one")] | Annotated[tuple[Source, ...], Tag("mixture")],
        Discriminator(_one_or_mixture),
        "text or list of {source, weight}",
    ] = Field("stdlib", description="A corpus by name, a file, folder or pattern; or a mixture of these.")
    tokenizer: str = Field(
        "bpe:4096", description="gpt2, bytes, char, bpe:N (trained on the text), a .json file or a folder."
    )
    order: Literal["shuffled", "sequential", "random"] = Field(
        "shuffled", description="Order of windows: permuted in each epoch, as in the text, or drawn with replacement."
    )
    val: Annotated[float | str, BeforeValidator(_share_or_source), "fraction or source"] = Field(
        0.05, description="The validation text: a fraction of the source, or a separate source."
    )
    split: Literal["documents", "tail", "huggingface"] = Field(
        "documents", description="How a fraction is held out: by a document's hash, from the end, or as datasets does."
    )
    split_seed: Integer = Field(
        2357, ge=0, lt=SEEDS, description="Decides which documents or rows val gets, and where scattered documents go."
    )
    column: str = Field("text", min_length=1, description="The column of jsonl and parquet with the text.")
    limit: Annotated[Integer, Field(gt=0)] | None = Field(
        None, description="Use only the first rows of each source: lines of text, rows of jsonl and parquet."
    )
    scatter: bool | None = Field(
        None, description="Spread documents over the shards at random; by default from 1 GB of text up."
    )
    dedup: Literal["exact"] | None = Field(None, description="exact removes copies of documents; it also scatters.")
    cache: Annotated[Annotated[Number, Field(gt=0)] | None, May.CHANGE] = Field(
        None, description="GB of a node's disk for shards of scattered stores on S3; by default half of what is free."
    )

    @field_validator("tokenizer")
    @classmethod
    def _known_tokenizer(cls, name: str) -> str:
        refuse_credentials("data.tokenizer", name)
        bpe = re.fullmatch(r"bpe:([0-9]{1,9})", name)
        is_path = name.endswith(".json") or "/" in name
        if name in ("gpt2", "bytes", "char") or is_path or (bpe and MIN_BPE <= int(bpe[1]) <= MAX_BPE):
            return name
        if name.startswith("bpe"):
            raise ValueError(
                f"data.tokenizer: {shown(name)} is not bpe:N with a whole N from {MIN_BPE} to {MAX_BPE}; "
                "write e.g. data.tokenizer: bpe:4096"
            )
        raise ValueError(
            f"data.tokenizer: {shown(name)} is not gpt2, bytes, char, bpe:N, a .json file or a ./folder; "
            "write e.g. data.tokenizer: bpe:4096"
        )

    @field_validator("source", "val")
    @classmethod
    def _hold_no_credentials(cls, value: Any, info: ValidationInfo) -> Any:
        parts = value if isinstance(value, tuple) else [value]
        for part in parts:
            refuse_credentials(f"data.{info.field_name}", getattr(part, "source", str(part)))
        return value

    @model_validator(mode="after")
    def _texts_are_distinct(self) -> Self:
        names = [part.source for part in self.sources]
        if not names:
            raise ValueError("data.source: the mixture is empty; write e.g. data.source: stdlib")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise ValueError(f"data.source: {shown(twice)} is in the mixture twice; write it once")
        if self.val in names:
            raise ValueError(f"data.val: {shown(self.val)} is also trained on; write e.g. data.val: 0.05")
        return self

    @model_validator(mode="after")
    def _split_has_a_share(self) -> Self:
        if isinstance(self.val, str) and self.split != "documents":
            raise ValueError(
                f"data.split: {self.split} needs a fraction, but data.val is the source {shown(self.val)}; "
                "write e.g. data.val: 0.05, or data.split: documents"
            )
        return self

    @model_validator(mode="after")
    def _limit_is_known_to_the_split(self) -> Self:
        if self.limit and self.split == "huggingface":
            raise ValueError(
                f"data.limit: {self.limit} is not for data.split huggingface, which draws from all rows; "
                "write data.split: documents"
            )
        return self

    @model_validator(mode="after")
    def _scattering_is_possible(self) -> Self:
        if self.dedup and self.scatter is False:
            raise ValueError(
                "data.scatter: false leaves copies far apart, but data.dedup: exact brings them together; "
                "leave data.scatter out"
            )
        key = "data.dedup: exact" if self.dedup else "data.scatter: true"
        if (self.dedup or self.scatter) and self.order == "sequential":
            raise ValueError(
                f"{key} changes the order of the text, which data.order: sequential keeps; write data.order: shuffled"
            )
        return self

    @property
    def sources(self) -> tuple[Source, ...]:
        """The mixture; a single source is a mixture of one."""
        return (Source(source=self.source, weight=1.0),) if isinstance(self.source, str) else self.source
