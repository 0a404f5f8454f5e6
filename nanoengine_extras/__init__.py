"""Optional features of the engine. Each is a file, imported on demand, that can be deleted.

The engine reads these tables. A row whose file is deleted does nothing.
"""

# the file of each observer, and its class, in the order in which the engine calls them
OBSERVERS = {
    "running.metrics": "Metrics",
    "sampling.texts": "Texts",
    "running.guards": "Guards",
    "running.threads": "Threads",
    "sampling.logprobs": "Logprobs",
    "sampling.beam_search": "Beams",
    "sampling.constraints": "Constraints",
    "sampling.structured_outputs": "Grammars",
    "sampling.logits_processors": "Processors"}
# the observers that every engine has; the others come when a request asks for them
ALWAYS = ("running.metrics", "sampling.texts", "running.guards", "running.threads")
# the slots that a file fills in every engine, with what it has in its PARTS
STANDARD = {
    "driver": "running.shared_steps",
    "checks": "running.strict",
    "progress_bar": "running.metrics",
    "text_of": "sampling.texts",
    "texts_of_tokens": "sampling.texts",
    "default_params": "models.generation_config",
    "free_bytes": "running.memory",
    "backends": "running.backends",
    **dict.fromkeys(("find_model", "load_config", "any_loader"), "models.sources"),
    "check_folder": "models.explain",
    "check_names": "models.explain"}
# the classes that `from nanoengine import …` finds in a file
EXPORTS = dict.fromkeys(
    ("BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"), "sampling.beam_search")
