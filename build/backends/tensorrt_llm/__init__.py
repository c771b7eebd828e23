"""Roles for TensorRT-LLM: compiled engines on releases 1.0 to 1.2, arguments of the LLM class from 1.3 on.

release.py    what each release line has · settings.py: a role's settings for it · flags.py: what trtllm-build takes
shards.py     which part of which tensor each rank gets · checkpoint.py: the converted checkpoint · fp8.py
runs.py       runs trtllm-build · engine_dir.py: reads and checks what it made · inspect_engines.py: opens the engines
llm_args.py   the arguments file · backend.py: all of it behind one door, as the builder needs it

Nothing here imports tensorrt_llm, so plans, conversions and checks run anywhere.
"""
