"""`run` and `track`: where the results go, and which trackers get the metrics."""

import re
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from raygpt.config.parts import Integer, Part, refuse_credentials, shown


class Run(Part):
    """The run directory: storage/name."""

    name: str | None = Field(None, description="Name of the run directory; null takes the recipe's name.")
    storage: str = Field("runs", min_length=1, description="Folder or s3:// address of the runs; shared by all nodes.")
    keep: Integer = Field(3, gt=0, description="Newest checkpoints that are kept.")
    keep_best: Integer = Field(1, ge=0, description="Checkpoints with the lowest validation loss that are also kept.")
    keep_every: Annotated[Integer, Field(gt=0)] | None = Field(
        None, description="Checkpoints at multiples of this step are always kept."
    )
    failed_saves: Integer = Field(5, gt=0, description="Failed checkpoints in a row after which the run ends.")
    start_from: str | None = Field(
        None, description="RUN or RUN@STEP: start from that run's state; a name in storage or a path."
    )

    @field_validator("storage", "start_from")
    @classmethod
    def _hold_no_credentials(cls, address: str | None, info: ValidationInfo) -> str | None:
        refuse_credentials(f"run.{info.field_name}", address or "")
        return address

    @field_validator("storage")
    @classmethod
    def _is_a_folder_or_on_s3(cls, storage: str) -> str:
        if "://" in storage and not re.match(r"s3://[^/]", storage):
            raise ValueError(
                f"run.storage: {shown(storage)} is neither a folder nor an address on S3; "
                "write e.g. run.storage: s3://bucket/runs"
            )
        return storage

    @field_validator("name")
    @classmethod
    def _is_a_plain_folder_name(cls, name: str | None) -> str | None:
        if name is None:
            return None
        if name.lower() == "stores":  # lower: on a Mac, Stores is the same folder
            raise ValueError(f"run.name: {name!r} is the folder of prepared tokens; write e.g. run.name: my-run")
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}", name):
            raise ValueError(
                f"run.name: {shown(name)} is not 1 to 128 of A-Z a-z 0-9 . _ - without a '.' in front; "
                "write e.g. run.name: my-run"
            )
        return name


def _flag_or_address(mlflow: object) -> object:
    """'true' -> True, and an address stays."""
    if str(mlflow).lower() in ("true", "false"):
        return str(mlflow).lower() == "true"
    if not re.match(r"[a-z+]+:|databricks$", str(mlflow)):
        raise ValueError(
            f"track.mlflow: {shown(mlflow)} is neither true nor an address; write true, or e.g. http://host:5000"
        )
    refuse_credentials("track.mlflow", str(mlflow))
    return mlflow


def _project(wandb: object) -> object:
    if str(wandb).lower() in ("true", "false"):
        raise ValueError(
            f"track.wandb: {str(wandb).lower()} is no name of a project; write e.g. track.wandb: my-project, or null"
        )
    return wandb


class Track(Part):
    """Trackers; each needs the extra of its name."""

    tensorboard: bool = Field(False, description="Event files in the run's folder: tensorboard --logdir RUN.")
    wandb: Annotated[Annotated[str, Field(min_length=1)] | None, BeforeValidator(_project), "text | null"] = Field(
        None, description="A Weights & Biases project; WANDB_MODE=offline keeps it on this disk."
    )
    mlflow: Annotated[bool | str, BeforeValidator(_flag_or_address), "true or address"] = Field(
        False, description="A tracking server's address, or true: mlflow.db beside the runs."
    )
