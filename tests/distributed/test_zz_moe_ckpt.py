from tests.distributed.test_moe import *
from tests.distributed.test_moe import folder
from tests.distributed import zz_moe_ckpt_cases as z

EP2 = Case(data=2, expert=2, optimizer="adam")
EP1 = Case(optimizer="adam")


def test_keys(ranks, folder):
    for case in (EP2, Case(pipeline=2, optimizer="adam")):
        r = ranks.run(case.ranks, z.keys, folder, case)
        print("=====", case)
        for k, v in r[-1].items():
            if "layers." not in k or ".layers.0." in k:
                print(k, "->", v)


def test_pieces(ranks, folder, tmp_path):
    names, w, w2, g = ranks.run(2, z.save_pieces, folder, EP2, SAMPLES, tmp_path / "ck")[0]
    print(names)
    for case in (
        EP1,
        EP2,
        Case(pipeline=2, optimizer="adam"),
        Case(data=2, optimizer="adam"),
        Case(tensor=2, sequence=True, expert=2, optimizer="adam"),
    ):
        a, b, g2 = ranks.run(case.ranks, z.load_pieces, folder, case, SAMPLES, tmp_path / "ck", names)[0]
        print(case, "model equal", all(torch.equal(a[n], w[n]) for n in w), "grad norm", g, g2)
        moved = {n: float((b[n] - w2[n]).norm() / (w2[n] - w[n]).norm()) for n in w}
        print("   next update off by", max(moved.items(), key=lambda t: t[1]))
