"""llama.cpp's server out of the wheel of xllamacpp, until a signal: MODEL NAME TEMPLATE PORT."""

import signal
import sys
from pathlib import Path

import xllamacpp

model, name, template, port = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path, params.model_alias = model, {name}
params.chat_template = Path(template).read_text(encoding="utf-8")
params.hostnames, params.port = ["127.0.0.1"], int(port)
params.endpoint_metrics = True
params.n_parallel, params.n_ctx = 4, 4 * 1024
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
signal.pause()
