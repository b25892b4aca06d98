"""`/v1/console`, the one answer that the operator's page shows."""

from unit.serve.test_serve_gateway import a_body, check


def test_one_answer_has_what_the_page_shows():
    async def test(client, pools, gateway):
        pools["a"].num_waiting = 3
        assert (await client.post("/v1/completions", json=a_body())).status_code == 200
        gateway.draining = True
        assert (await client.post("/v1/completions", json=a_body())).status_code == 503
        shown = (await client.get("/v1/console")).json()
        bins = shown["bins"]  # One, or two where the second begins meanwhile.
        for what in ("finished", "kept", "refused"):
            assert sum(one[what] for one in bins) == 1
        first, _ = shown["replicas"]
        named = dict(zip(shown["columns"], first, strict=True))
        assert shown["problems"] == {"a": {}, "b": {}}
        assert (named["replica_id"], named["state"], named["waiting"]) == ("a-0", "ready", 3)
        assert (named["believed_ms"], named["measured_ms"]) == (14.0, None)
        assert shown["queue"] == {"held": 0, "requests": [], "full": {}}
        assert shown["autopilot"] == {"vetoed": False, "report": None, "reported_s": None}
        assert not shown["has_allocation"]
        later = (await client.get(f"/v1/console?since_s={shown['now_s'] + 100}")).json()
        assert later["bins"] == []
        assert (await client.get("/v1/console?since_s=nan")).status_code == 422

    check(test)


def test_a_decision_stands_beside_the_choice_of_the_baseline():
    async def test(client, pools, gateway):
        await client.post("/v1/policy", json={"policy": "sed"})
        pools["a"].num_waiting = 3
        await client.post("/v1/completions", json=a_body())
        shown = (await client.get("/v1/console")).json()
        (decision,) = shown["decisions"]
        assert decision["candidates"][0]["replica_id"] == "b-0"
        assert decision["by_rule"] == "b-0"

    check(test)


def test_the_page_and_its_parts_come_from_the_gateway_alone():
    async def test(client, pools, gateway):
        page = await client.get("/")
        assert "'unsafe-inline'" not in page.headers["content-security-policy"]
        for name, kind in (("console.css", "css"), ("console.js", "java"), ("charts.js", "java")):
            part = await client.get(f"/{name}")
            assert part.status_code == 200
            assert kind in part.headers["content-type"]
            assert name in page.text + (await client.get("/console.js")).text

    check(test)
