"""What a model can be asked to do, and what comes out."""

from __future__ import annotations

from enum import Enum


class DataType(Enum):
    """The kind of thing a request returns; the value is its default file extension."""

    IMAGE = "png"
    VIDEO = "mp4"
    MESH = "glb"
    ACTION = "json"


class ModelTaskType(Enum):
    """A task: what goes in and what comes out. Members are named ``{inputs}2{output}``."""

    T2I = "T2I"
    I2I = "I2I"
    TI2I = "TI2I"
    T2V = "T2V"
    I2V = "I2V"
    TI2V = "TI2V"
    V2V = "V2V"
    F2V = "F2V"
    I2M = "I2M"
    VLA_ACTION = "VLA_ACTION"

    @classmethod
    def parse(cls, value: ModelTaskType | str) -> ModelTaskType:
        """A member, from itself or from its name in any case.

        Raises:
            ValueError: no task has that name; the message lists them.
        """
        if isinstance(value, cls):
            return value
        name = value.strip().upper() if isinstance(value, str) else ""
        if name not in cls.__members__:
            raise ValueError(f"task_type={value!r} is not one of {', '.join(cls.__members__)}")
        return cls[name]

    def data_type(self) -> DataType:
        """The kind of output this task produces."""
        if self is ModelTaskType.VLA_ACTION:
            return DataType.ACTION
        return {"I": DataType.IMAGE, "V": DataType.VIDEO, "M": DataType.MESH}[self.value[-1]]

    @property
    def requires_image_input(self) -> bool:
        """Whether a request without an input image makes no sense."""
        return self in (ModelTaskType.I2I, ModelTaskType.I2V, ModelTaskType.I2M)

    @property
    def accepts_image_input(self) -> bool:
        """Whether a request may carry an input image."""
        optional = (ModelTaskType.TI2I, ModelTaskType.TI2V, ModelTaskType.VLA_ACTION)
        return self.requires_image_input or self in optional

    @property
    def requires_video_input(self) -> bool:
        """Whether a request without an input video makes no sense."""
        return self in (ModelTaskType.V2V, ModelTaskType.F2V)

    @property
    def accepts_video_input(self) -> bool:
        """Whether a request may carry an input video: no task takes one at will."""
        return self.requires_video_input

    @property
    def is_image_gen(self) -> bool:
        """Whether pictures come out."""
        return self.data_type() is DataType.IMAGE

    @property
    def is_video_gen(self) -> bool:
        """Whether video comes out."""
        return self.data_type() is DataType.VIDEO

    @property
    def is_visual_gen(self) -> bool:
        """Whether pictures or video come out."""
        return self.is_image_gen or self.is_video_gen

    @property
    def is_mesh_gen(self) -> bool:
        """Whether a mesh comes out."""
        return self.data_type() is DataType.MESH

    @property
    def is_action_gen(self) -> bool:
        """Whether robot actions come out."""
        return self.data_type() is DataType.ACTION
