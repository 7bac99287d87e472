"""All settings by name, and the work of each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .clip import CLIP_METHODS, CLIP_VIT_B32, ClipSetting, ClipStudy, smallest_clip
from .methods import methods_of
from .settings import SETTINGS as CLASSIFIERS
from .settings import Setting
from .settings import smallest_of as smallest_classifier
from .study import Study


AnySetting = Setting | ClipSetting
SETTINGS: dict[str, AnySetting] = {**CLASSIFIERS, CLIP_VIT_B32.name: CLIP_VIT_B32}


def smallest_of(setting: AnySetting) -> AnySetting:
    """Return the setting with a tiny model and made-up data."""
    if isinstance(setting, ClipSetting):
        return smallest_clip(setting)
    return smallest_classifier(setting)


def rows_of(setting: AnySetting) -> Mapping[str, Any]:
    """Return all methods of a setting's task, by name."""
    return CLIP_METHODS if isinstance(setting, ClipSetting) else methods_of(setting)


def new_study(setting_name: str, smallest: bool, data: Path | None, runs: Path, device: str) -> Study:
    """Return the work of a setting; each process makes its own."""
    setting = SETTINGS[setting_name]
    start = start_of(setting, data)
    if smallest:
        setting = smallest_of(setting)
    files = None
    if data is not None:
        files = data / "data" if (data / "data").is_dir() else data
    kind = ClipStudy if isinstance(setting, ClipSetting) else Study
    return kind(setting, files, start, runs / setting.name, device)


def start_of(setting: AnySetting, data: Path | None) -> str:
    """Return the folder of the pre-trained model, or its Hub name."""
    folder = None if data is None else data / "weights" / setting.start.rpartition("/")[2]
    return str(folder) if folder is not None and folder.is_dir() else setting.start
