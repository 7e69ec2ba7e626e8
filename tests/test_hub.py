"""Models on a Hub: pushed with their code by plain `push_to_hub`, loaded by processes that lack hf_relpos.

Three client processes, in this order, do all the work, and the tests look at what they left:

| process   | hf_relpos | what it does                                                        |
| --------- | --------- | ------------------------------------------------------------------- |
| author    | yes       | makes models and pushes them                                        |
| elsewhere | no        | loads what the author pushed; fine-tunes some of it and pushes that |
| home      | yes       | loads everything                                                    |

Each begins with empty caches.
"""

import json
import re
from pathlib import Path

import pytest
import selection
import torch
from hub_fixtures import running_hub
from huggingface_hub import ModelCard

from hf_relpos import RelPosBertConfig
from hf_relpos.models.modeling_relpos_bert import AUTO_MAP, HEADS
from hf_relpos.models.saved_code.bundle import bundle
from hf_relpos.models.saved_code.remote_code import CONFIGURATION, MODELING
from hf_relpos.schemes import SCHEMES


CODE = {CONFIGURATION, MODELING}
MODEL = {"README.md", "config.json", "model.safetensors"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}

# the names of repositories become names of Python modules: Transformers escapes dots and hyphens
# what the code makes of every scheme and head elsewhere is in test_saved_code.py; here is how it gets there
SOME_SCHEMES, SOME_HEADS = ("shaw", "tupe", "hop"), ("AutoModel", "AutoModelForCausalLM", "AutoModelForMultipleChoice")
BY_SCHEME = {name: f"user/bert-1.5-{name}" for name in (SCHEMES if selection.full else SOME_SCHEMES)}
BY_HEAD = {auto: f"user/{auto}" for auto in (HEADS if selection.full else SOME_HEADS)}
MAIN = BY_SCHEME["shaw"]  # has a tokenizer, and revisions

TUNED = "user/tuned-elsewhere"
SAVED = ["user/saved-elsewhere", "user/fresh-elsewhere"]
IN_PLACE = "user/in-place"  # by save_pretrained(folder, push_to_hub=True)
STOPPED = "user/stopped"  # by the Trainer during training only
BARE = ["user/bare", "user/bare-elsewhere"]

TOOLS = """
import json, os, sys
from pathlib import Path
import torch, transformers
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers import BertTokenizer

shared, me = Path(os.environ["SHARED"]), os.environ["ME"]
plan = json.loads((shared / "plan.json").read_text())
notes, outputs = {}, {}

@torch.no_grad()
def run(model):
    # what the head gives, and what the encoder under it gives
    inputs = torch.load(shared / "inputs.pt")
    choices = {key: tensor[:, None].repeat(1, 2, 1) for key, tensor in inputs.items()}
    batch, length = inputs["input_ids"].shape
    places = torch.arange(length)
    needed = getattr(model.config, "required_inputs", ())
    if "grid" in needed:
        inputs["position_ids"] = torch.stack([places // 3, places % 3], dim=-1)[None]
    if "relation_ids" in needed:
        inputs["relation_ids"] = (places[:, None] < places).long().expand(batch, -1, -1)
    model.eval()
    multiple = "MultipleChoice" in type(model).__name__
    return {"head": model(**(choices if multiple else inputs))[0], "base": model.base_model(**inputs)[0]}

def push(model, repo, **options):
    sha = model.push_to_hub(repo, **options).oid
    outputs[repo] = run(model)
    return sha

def train(model, tokenizer, repo, labels, finish=True, **options):
    from transformers import Trainer, TrainingArguments

    words = tokenizer("the cat sat on a mat")
    rows = [{**words, "labels": words["input_ids"] if labels is None else labels}] * 2
    args = TrainingArguments(repo.split("/")[1], max_steps=2, per_device_train_batch_size=1, learning_rate=0.01,
                             report_to="none", use_cpu=True, disable_tqdm=True, **options)
    before = model.get_input_embeddings().weight.clone()
    trainer = Trainer(model, args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    if finish:
        trainer.push_to_hub()
    assert not torch.equal(before, model.get_input_embeddings().weight)
    outputs[repo] = run(model)

def load_all(repos, **options):
    # every (Auto class, repository, revision) of the plan
    for auto, repo, revision in repos:
        key = f"{auto} {repo} {revision}"
        model, info = getattr(transformers, auto).from_pretrained(
            repo, revision=revision, output_loading_info=True, **options
        )
        outputs[key] = run(model)
        notes[key] = {"module": type(model).__module__, "class": type(model).__name__,
                      "missing": sorted(info["missing_keys"])}

def error(function, *args, **options):
    try:
        function(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def finish():
    torch.save(outputs, shared / f"{me}.pt")
    (shared / f"{me}.json").write_text(json.dumps(notes))
"""

AUTHOR = """
sys.path.insert(0, os.environ["TESTS"])
from oracles import tiny_model
from transformers import BertConfig, BertForMaskedLM
from hf_relpos.models.modeling_relpos_bert import HEADS

words = "[PAD] [UNK] [CLS] [SEP] [MASK] the a cat dog sat on mat".split()
Path("vocab.txt").write_text("\\n".join(words))
tokenizer = BertTokenizer("vocab.txt")
sentences = ["the cat sat on a mat", "a dog sat"]
inputs = tokenizer(sentences, padding=True, return_tensors="pt")
notes["input_ids"] = inputs["input_ids"].tolist()
torch.save(dict(inputs), shared / "inputs.pt")

torch.manual_seed(0)
for scheme, repo in plan["by_scheme"].items():
    model = tiny_model(HEADS["AutoModelForMaskedLM"], scheme, vocab_size=len(words))
    sha = push(model, repo)
    if repo == plan["main"]:
        tokenizer.push_to_hub(repo)
        notes["pinned"] = sha
        with torch.no_grad():
            model.cls.predictions.bias += 1
        outputs["dev"] = run(model)
        model.push_to_hub(repo, revision="dev")
for auto, repo in plan["by_head"].items():
    decoder = auto == "AutoModelForCausalLM"
    push(tiny_model(HEADS[auto], "shaw", vocab_size=len(words), is_decoder=decoder), repo, private=True)
push(tiny_model(HEADS["AutoModelForMaskedLM"], "t5", vocab_size=len(words)), "user/loaded-once")
push(tiny_model(HEADS["AutoModelForMaskedLM"], "shaw", vocab_size=len(words), save_code=False), "user/bare")

model = tiny_model(HEADS["AutoModelForMaskedLM"], "relative_key", vocab_size=len(words))
train(model, tokenizer, "user/trained", None, push_to_hub=True, save_steps=1)
train(model, tokenizer, "user/stopped", None, finish=False, push_to_hub=True, save_steps=2)
model.save_pretrained("in-place", push_to_hub=True)
outputs["user/in-place"] = run(model)

# what stock Transformers makes of a relative BERT: the configuration stays, the tables go
sizes = dict(vocab_size=len(words), hidden_size=24, num_attention_heads=3, num_hidden_layers=1, intermediate_size=32)
BertForMaskedLM(BertConfig(**sizes)).push_to_hub("user/lost")
lost = BertForMaskedLM(BertConfig(**sizes, position_embedding_type="relative_key"))
lost.push_to_hub("user/lost", revision="lost")
finish()
"""

ELSEWHERE = """
remote = dict(trust_remote_code=True)
pinned = json.loads((shared / "author.json").read_text())["pinned"]
load_all([*plan["first"], ["AutoModelForMaskedLM", plan["main"], pinned]], **remote)

outputs["loaded once"] = run(AutoModelForMaskedLM.from_pretrained("user/loaded-once", **remote))
notes["unasked"] = error(AutoModelForMaskedLM.from_pretrained, plan["main"])
notes["bare"] = error(AutoModelForMaskedLM.from_pretrained, "user/bare", **remote)
for repo in (plan["main"], "user/trained"):
    for options in ({}, remote):
        tokenizer = AutoTokenizer.from_pretrained(repo, **options)
        key = f"tokens {repo} {bool(options)}"
        notes[key] = tokenizer(["the cat sat on a mat", "a dog sat"], padding=True)["input_ids"]
fill = transformers.pipeline("fill-mask", model=plan["main"], **remote)
notes["fill"] = fill("the [MASK] sat")[0]["sequence"]

model = AutoModelForSequenceClassification.from_pretrained(plan["main"], num_labels=3, **remote)
train(model, tokenizer, "user/tuned-elsewhere", 1)
push(AutoModelForMaskedLM.from_pretrained(plan["main"], **remote), "user/saved-elsewhere")
config = AutoConfig.from_pretrained(plan["main"], **remote)
model = AutoModelForMaskedLM.from_config(config, **remote)
push(model, "user/fresh-elsewhere")
model.config.save_code = False
push(model, "user/bare-elsewhere")
finish()
"""

HOME = """
from hf_relpos import RelPosBertForMaskedLM
load_all(plan["first"] + plan["second"])
outputs["direct"] = run(RelPosBertForMaskedLM.from_pretrained(plan["main"]))
outputs["asked"] = run(AutoModelForMaskedLM.from_pretrained(plan["main"], trust_remote_code=True))
outputs["bare"] = run(AutoModelForMaskedLM.from_pretrained("user/bare"))
notes["lost"] = error(RelPosBertForMaskedLM.from_pretrained, "user/lost", revision="lost")
notes["not lost"] = error(RelPosBertForMaskedLM.from_pretrained, "user/lost")
finish()
"""

MASKED = "AutoModelForMaskedLM"
CLASSIFIER = "AutoModelForSequenceClassification"
FIRST = [
    *[(MASKED, repo, "main") for repo in BY_SCHEME.values()],
    *[(auto, repo, "main") for auto, repo in BY_HEAD.items()],
    *[(auto, MAIN, "main") for auto in HEADS if auto != MASKED],
    (MASKED, MAIN, "dev"),
    (MASKED, "user/trained", "main"),
    (MASKED, IN_PLACE, "main"),
    (MASKED, STOPPED, "main"),
]
SECOND = [(CLASSIFIER, TUNED, "main"), ("AutoModel", TUNED, "main"), *((MASKED, repo, "main") for repo in SAVED)]


class Story:
    """The Hub after the three processes, and what each of them noted."""

    def __init__(self, hub, folder: Path):
        self.hub, self.folder = hub, folder
        self.notes, self.outputs, self.requests, self.printed = {}, {}, {}, {}
        plan = {"main": MAIN, "by_scheme": BY_SCHEME, "by_head": BY_HEAD}
        plan |= {"first": FIRST, "second": SECOND}
        (folder / "plan.json").write_text(json.dumps(plan))

    def play(self, me: str, code: str, without: tuple[str, ...] = ()) -> None:
        before = len(self.hub.requests)
        env = {"SHARED": str(self.folder), "TESTS": str(Path(__file__).parent), "ME": me}
        done = self.hub.run(TOOLS + code, without=without, extra_env=env)
        self.printed[me] = done.stdout + done.stderr
        self.notes[me] = json.loads((self.folder / f"{me}.json").read_text())
        self.outputs[me] = torch.load(self.folder / f"{me}.pt")
        self.requests[me] = self.hub.requests[before:]

    def pushed(self, repo: str) -> dict[str, torch.Tensor]:
        """Outputs of the model in a repository, from the process that pushed it last."""
        return [outputs[repo] for outputs in self.outputs.values() if repo in outputs][-1]

    def config(self, repo: str, revision: str = "main") -> dict:
        return json.loads(self.hub.files(repo, revision)["config.json"])


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    with running_hub(tmp_path_factory.mktemp("hub")) as hub:
        story = Story(hub, tmp_path_factory.mktemp("shared"))
        story.play("author", AUTHOR)
        story.play("elsewhere", ELSEWHERE, without=("hf_relpos",))
        story.play("home", HOME)
        yield story


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and (one - other).abs().max().item() <= 1e-5


def verify_weights(story: Story, who: str, auto: str, repo: str, revision: str):
    """That process loaded the right class and got what the pusher got: from the head too, if it was saved."""
    key = f"{auto} {repo} {revision}"
    notes, outputs = story.notes[who][key], story.outputs[who][key]
    expected = story.outputs["author"]["dev"] if revision == "dev" else story.pushed(repo)
    assert notes["class"] == HEADS[auto].__name__
    own = notes["module"] == "hf_relpos.models.modeling_relpos_bert"
    remote = notes["module"].startswith("transformers_modules.user.")
    assert (own, remote) == ((True, False) if who == "home" else (False, True))
    assert same(outputs["base"], expected["base"])
    if auto == next((head for head, own in BY_HEAD.items() if own == repo), CLASSIFIER if repo == TUNED else MASKED):
        assert same(outputs["head"], expected["head"]) and notes["missing"] == []
    else:  # a new head, on the encoder that was saved
        assert not [name for name in notes["missing"] if re.search(r"\b(embeddings|encoder)\.", name)]


# What a push leaves on the Hub -----------------------------------------------------------------------------------


def expected_files(repo: str) -> set[str]:
    files = MODEL | (set() if repo in BARE else CODE)
    if repo == BY_HEAD["AutoModelForCausalLM"]:
        files |= {"generation_config.json"}
    if repo in (MAIN, "user/trained", STOPPED, TUNED):
        files |= TOKENIZER | (set() if repo == MAIN else {"training_args.bin"})
    return files - ({"README.md"} if repo == STOPPED else set())


REPOS = [
    *BY_SCHEME.values(),
    *BY_HEAD.values(),
    "user/trained",
    TUNED,
    *SAVED,
    *BARE,
    IN_PLACE,  # the code, copied just before, must not count as old
    STOPPED,  # of a checkpoint the Trainer pushes config.json and weights only
]


@pytest.mark.parametrize("repo", REPOS)
def test_files(story, repo):
    """The code made for the configuration, byte for byte, whoever pushed it; and one true map."""
    files = story.hub.files(repo)
    assert set(files) == expected_files(repo)
    private = story.hub.token.encode(), str(story.folder.parent).encode()
    told = {name for name, content in files.items() if any(word in content for word in private)}
    assert told <= {"training_args.bin"}  # the Trainer's own, which names its folder
    code = {} if repo in BARE else bundle(RelPosBertConfig.from_dict(story.config(repo)))
    assert {name: text.decode() for name, text in files.items() if name.endswith(".py")} == code
    assert story.config(repo).get("auto_map") == (None if repo in BARE else AUTO_MAP)


@pytest.mark.parametrize("repo", [repo for repo in REPOS if repo != STOPPED])
def test_card(story, repo):
    card = ModelCard(story.hub.files(repo)["README.md"].decode())
    assert card.data.library_name == "transformers"
    if repo in ("user/trained", TUNED):
        assert "generated_from_trainer" in card.data.tags
    assert card.data.base_model == (MAIN if repo == TUNED else None)


def test_repositories(story):
    main, dev = (story.hub.files(MAIN, revision) for revision in ("main", "dev"))
    assert main["model.safetensors"] != dev["model.safetensors"] and set(dev) >= MODEL | CODE
    assert all(story.hub.server.repos[repo].private for repo in BY_HEAD.values())
    assert story.config("user/bare")["save_code"] is False
    assert [request for request in story.hub.requests if request.status in (400, 405, 422, 500, 501)] == []


# Where hf_relpos cannot be imported ------------------------------------------------------------------------------


@pytest.mark.parametrize("auto, repo, revision", FIRST)
def test_loading_elsewhere(story, auto, repo, revision):
    """Of private repositories, too, and with every head on an encoder that was saved with another one."""
    verify_weights(story, "elsewhere", auto, repo, revision)
    if repo == MAIN and auto in ("AutoModelForCausalLM", "AutoModelForPreTraining"):  # these read its vocabulary head
        assert same(story.outputs["elsewhere"][f"{auto} {MAIN} main"]["head"], story.pushed(MAIN)["head"])


def test_revisions_elsewhere(story):
    verify_weights(story, "elsewhere", MASKED, MAIN, story.notes["author"]["pinned"])
    dev, main = (story.outputs["elsewhere"][f"{MASKED} {MAIN} {revision}"]["head"] for revision in ("dev", "main"))
    assert not same(dev, main)


@pytest.mark.parametrize("repo", [MAIN, "user/trained"])
@pytest.mark.parametrize("trust", [False, True], ids=["plain", "trust"])
def test_tokenizer_elsewhere(story, repo, trust):
    """Its class is Transformers' own: if nobody agrees to run the code of the model, it loads all the same."""
    assert story.notes["elsewhere"][f"tokens {repo} {trust}"] == story.notes["author"]["input_ids"]


ANSWERS = [
    ("fill", "the .*sat"),  # what a pipeline returns
    ("unasked", "ValueError: .*trust_remote_code=True"),  # code runs only when it is trusted
    ("bare", "ValueError: .*relpos_bert"),  # without its code the model is unknown
]


@pytest.mark.parametrize("note, words", ANSWERS)
def test_answers_elsewhere(story, note, words):
    assert re.match(words, story.notes["elsewhere"][note], re.DOTALL)


# Where hf_relpos is imported -------------------------------------------------------------------------------------


@pytest.mark.parametrize("auto, repo, revision", FIRST + SECOND)
def test_installed_class_wins(story, auto, repo, revision):
    """Without a flag, and so without a prompt: nobody answers one there."""
    verify_weights(story, "home", auto, repo, revision)


@pytest.mark.parametrize("how, repo", [("direct", MAIN), ("asked", MAIN), ("bare", "user/bare")])
def test_installed_class_wins_when_asked_for_the_other(story, how, repo):
    """And it needs no code beside the weights."""
    assert same(story.outputs["home"][how]["head"], story.pushed(repo)["head"])


def test_no_code_is_downloaded(story):
    assert [request.path for request in story.requests["elsewhere"] if request.path.endswith(".py")]
    assert not [request.path for request in story.requests["home"] if request.path.endswith(".py")]


def test_two_files_are_downloaded_and_warned_of(story):
    """For each Transformers asks the Hub twice, and warns once that it be checked for malice."""
    assert same(story.outputs["elsewhere"]["loaded once"]["head"], story.pushed("user/loaded-once")["head"])
    requests = [r.path for r in story.requests["elsewhere"] if "user/loaded-once" in r.path]
    code = [path for path in requests if path.endswith(".py")]
    assert len(code) == 4 and {path.rpartition("/")[2] for path in code} == CODE, requests
    assert len(re.findall(r"downloaded from \S*user/loaded-once:", story.printed["elsewhere"])) == 2


def test_lost_tables_are_noticed_in_a_revision(story):
    """The check reads the configuration of the revision asked for: on `main` the same BERT is absolute."""
    assert re.match("ValueError: user/lost: .* the weights lack", story.notes["home"]["lost"], re.DOTALL)
    assert story.notes["home"]["not lost"] is None
