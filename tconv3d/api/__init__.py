"""What users import: functions, modules, `accelerate`, `explain`, `tune` and compiling before the first call."""
