"""`marginal_in_order` request by request, without arrays of queues: what the rule is held to."""

from tokenyard.routing.policies.delay import (
    ADDED_DECODE_S,
    ADDED_FIRST_TOKEN_S,
    ADDED_OTHERS_S,
    ADDED_WAIT_S,
    added_delays,
)


class SlowInOrder:
    """Costs of every replica, and who is taken to wait there: (key, tokens), earliest first."""

    def __init__(self, order, wait_weight, others_weight):
        self.order, self.weights, self.sent = order, (wait_weight, others_weight), {}

    def costs(self, request, snapshots):
        return [self.cost(request, one) for one in snapshots]

    def cost(self, request, snapshot):
        key_s = request.arrival_s + self.order.delay_s(request, snapshot)
        delays = added_delays(request, [snapshot])[0]
        wait_s, others_s = delays[ADDED_WAIT_S], delays[ADDED_OTHERS_S]
        service_s = delays[ADDED_FIRST_TOKEN_S] + delays[ADDED_DECODE_S] - wait_s
        waiting = self.waiting(snapshot)
        behind = [tokens for key, tokens in waiting if key > key_s]
        if snapshot.engine is None:
            wait_s = max(wait_s - sum(behind) / snapshot.full_tokens_per_s, 0.0)
            others_s = service_s * len(behind) / snapshot.num_slots
        else:
            prompts = max(snapshot.engine.prefill_in_flight_tokens, 1.0)
            wait_s *= 1.0 - min(sum(behind) / prompts, 1.0)
            before = len(waiting) - len(behind)
            others_s *= 1.0 - before / max(snapshot.num_outstanding, len(waiting), 1)
        return self.weights[0] * wait_s + service_s + self.weights[1] * others_s

    def waiting(self, snapshot):
        if snapshot.queue is not None:
            keys_s, tokens = snapshot.queue.order_keys_s, snapshot.queue.tokens
            return list(zip(keys_s.tolist(), tokens.tolist(), strict=True))
        sent = self.sent.setdefault(snapshot.replica_id, [])
        del sent[: max(len(sent) - snapshot.num_waiting, 0)]
        return sent

    def send(self, request, snapshot):
        key_s = request.arrival_s + self.order.delay_s(request, snapshot)
        tokens = request.predicted_total_tokens
        if snapshot.engine is not None:
            tokens = request.context_tokens
        sent = self.sent[snapshot.replica_id]
        sent.append((key_s, tokens))
        sent.sort(key=lambda one: one[0])
