"""Layer 2: a model endpoint that records, token for token, what a harness's model samples.

proxy = ProxyServer(ChatCodec.from_folder(folder), log, run_id)
await proxy.start()
endpoint = proxy.open_episode(EpisodeSpec(...))   # give it to Harness.launch
trace = await proxy.close_episode(episode_id)
"""

from clawgym_jax.proxy.chat_template import ChatCodec
from clawgym_jax.proxy.config import ProxyConfig
from clawgym_jax.proxy.episode import EpisodeSpec, EpisodeTrace
from clawgym_jax.proxy.ledger import PromptLedger
from clawgym_jax.proxy.server import ProxyServer

__all__ = ["ChatCodec", "EpisodeSpec", "EpisodeTrace", "PromptLedger", "ProxyConfig", "ProxyServer"]
