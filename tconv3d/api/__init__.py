"""Holds what users import: functions, modules, `accelerate`, `explain`, `tune` and `compile_ahead`."""
