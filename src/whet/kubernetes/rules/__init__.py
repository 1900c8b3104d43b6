"""Rules of the options of `whet k8s`, among them those that only the cluster's webhooks would apply."""

from dataclasses import replace

from whet.config import secrets
from whet.config.rules.ranges import Rule
from whet.errors import Problem
from whet.kubernetes.fields import KubernetesFields
from whet.kubernetes.rules.action import ACTION_RULES
from whet.kubernetes.rules.amounts import AMOUNT_RULES
from whet.kubernetes.rules.naming import NAMING_RULES
from whet.kubernetes.rules.nodes import NODE_RULES
from whet.kubernetes.rules.variables import VARIABLE_RULES


def _without_secrets(rule: Rule) -> Rule:
    """Return the rule; its problems show no value that looks like a secret."""

    def quiet(asked: KubernetesFields) -> Problem | None:
        found = rule(asked)
        if found is None:
            return None
        got = found.got if found.got is None else secrets.masked(str(found.got))
        return replace(found, what=secrets.masked(found.what), got=got)

    return quiet


_ALL: tuple[Rule, ...] = (*ACTION_RULES, *NAMING_RULES, *NODE_RULES, *AMOUNT_RULES, *VARIABLE_RULES)
RULES: tuple[Rule, ...] = tuple(_without_secrets(rule) for rule in _ALL)
