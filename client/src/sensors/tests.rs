//! Trees laid out as the kernel's documentation describes them.

use super::*;

const PCI: &str = "0000:03:00.0";

/// A machine below a temporary folder.
struct Machine {
    root: tempfile::TempDir,
}

impl Machine {
    fn new(files: &[(&str, &str)]) -> Self {
        let machine = Self { root: tempfile::tempdir().unwrap() };
        for (path, text) in files {
            machine.write(path, text);
        }
        machine
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.root.path().join(path.replace("CARD", &format!("sys/bus/pci/devices/{PCI}")));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn driver(&self, name: &str) {
        let link = self.root.path().join(format!("sys/bus/pci/devices/{PCI}/driver"));
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(format!("../../../../bus/pci/drivers/{name}"), link).unwrap();
    }

    fn sampler(&self, vram_bytes: Option<u64>) -> Sampler {
        let mut sampler = Sampler::at(self.root.path());
        sampler.look_at(PCI, vram_bytes);
        sampler
    }
}

fn xe_client(id: u32, cycles: u64, total: u64) -> String {
    format!(
        "pos:\t0\nflags:\t0100002\nmnt_id:\t26\nino:\t685\ndrm-driver:\txe\ndrm-client-id:\t{id}\n\
         drm-pdev:\t{PCI}\ndrm-total-system:\t0\ndrm-resident-system:\t0\ndrm-total-gtt:\t192 KiB\n\
         drm-resident-gtt:\t192 KiB\ndrm-total-vram0:\t23992 KiB\ndrm-resident-vram0:\t16 MiB\n\
         drm-cycles-rcs:\t0\ndrm-total-cycles-rcs:\t{total}\n\
         drm-cycles-ccs:\t{cycles}\ndrm-total-cycles-ccs:\t{total}\ndrm-engine-capacity-ccs:\t4\n"
    )
}

#[test]
fn an_xe_card_is_read_in_full() {
    let machine = Machine::new(&[
        ("proc/sys/kernel/osrelease", "6.14.0-arc\n"),
        ("proc/self/fdinfo/0", "pos:\t0\nflags:\t02\n"),
        ("proc/self/fdinfo/5", &xe_client(3, 1000, 10_000)),
        // A duplicate of the same file, another client, and another card's file.
        ("proc/self/fdinfo/6", &xe_client(3, 1000, 10_000)),
        ("proc/self/fdinfo/7", &xe_client(4, 0, 10_000)),
        ("proc/self/fdinfo/8", &xe_client(5, 9, 10_000).replace(PCI, "0000:0a:00.0")),
        ("CARD/tile0/gt0/freq0/act_freq", "2350\n"),
        ("CARD/tile0/gt0/freq0/cur_freq", "2400\n"),
        ("CARD/tile0/gt0/freq0/min_freq", "400\n"),
        ("CARD/tile0/gt0/freq0/max_freq", "2800\n"),
        ("CARD/tile0/gt0/freq0/throttle/status", "0\n"),
        ("CARD/hwmon/hwmon3/name", "xe\n"),
        ("CARD/hwmon/hwmon3/energy1_input", "1000000\n"),
        ("CARD/hwmon/hwmon3/energy1_label", "card\n"),
        ("CARD/hwmon/hwmon3/energy2_input", "7\n"),
        ("CARD/hwmon/hwmon3/power1_max", "230000000\n"),
        ("CARD/hwmon/hwmon3/temp2_input", "61000\n"),
        ("CARD/hwmon/hwmon3/temp2_label", "pkg\n"),
        ("CARD/hwmon/hwmon3/temp3_input", "66500\n"),
        ("CARD/hwmon/hwmon3/temp3_label", "vram\n"),
        ("CARD/hwmon/hwmon3/fan1_input", "1450\n"),
        ("CARD/hwmon/hwmon3/fan2_input", "0\n"),
        (
            "CARD/resource",
            "0x0000383fe0000000 0x0000383fe0ffffff 0x000000000014220c\n\
             0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
             0x0000382000000000 0x00003827ffffffff 0x000000000014220c\n",
        ),
        ("sys/kernel/debug/dri/1/name", "xe dev=0000:0a:00.0 unique=0000:0a:00.0\n"),
        ("sys/kernel/debug/dri/1/gt0/uc/guc_info", "GuC firmware: xe/other.bin\n\tfound 1.2.3\n"),
        ("sys/kernel/debug/dri/2/name", "xe dev=0000:03:00.0 unique=0000:03:00.0\n"),
        (
            "sys/kernel/debug/dri/2/gt0/uc/guc_info",
            "GuC firmware: xe/bmg_guc_70.bin\n\tstatus: RUNNING\n\twanted release version 70.29.2\n\
             \tfound release version 70.65.0\n\tfound compatibility version 1.23.1\n\tuCode: 361792 bytes\n",
        ),
    ]);
    machine.driver("xe");
    let mut sampler = machine.sampler(Some(24 << 30));
    let first = sampler.sample();
    assert!(first.lacks_rates());
    assert_eq!(first.kernel.as_deref(), Some("6.14.0-arc"));
    assert_eq!((first.pci.as_deref(), first.driver.as_deref()), (Some(PCI), Some("xe")));
    let vram = first.vram.unwrap();
    assert_eq!(vram.size_bytes, Some(24 << 30));
    assert_eq!(vram.allocated_bytes, Some(2 * (23_992 << 10)));
    assert_eq!(vram.resident_bytes, Some(2 * (16 << 20)));
    assert_eq!(first.gtt_bytes, Some(2 * (192 << 10)));
    assert_eq!(
        first.frequency,
        Some(Frequency {
            actual_mhz: Some(2350),
            requested_mhz: Some(2400),
            min_mhz: Some(400),
            max_mhz: Some(2800),
            throttled: Some(false),
        })
    );
    let degrees: Vec<_> = first.temperatures.iter().map(|at| (at.label.as_str(), at.celsius)).collect();
    assert_eq!(degrees, [("pkg", 61.0), ("vram", 66.5)]);
    let fans: Vec<_> = first.fans.iter().map(|fan| (fan.label.as_str(), fan.rpm)).collect();
    assert_eq!(fans, [("fan1", 1450), ("fan2", 0)]);
    let power = first.power.unwrap();
    assert_eq!((power.watts, power.limit_watts, power.energy_joules), (None, Some(230.0), Some(1.0)));
    assert_eq!(first.bar, Some(Bar { size_bytes: 32 << 30, whole: Some(true) }));
    let guc = first.guc.unwrap();
    assert_eq!((guc.file.as_deref(), guc.version.as_str()), (Some("xe/bmg_guc_70.bin"), "70.65.0"));
    assert_eq!(first.warnings, Vec::<String>::new());

    // Both clients together: 2000 of 10000 cycles on four engines.
    for (file, id) in [(5, 3), (6, 3), (7, 4)] {
        machine.write(
            &format!("proc/self/fdinfo/{file}"),
            &xe_client(id, if id == 3 { 2500 } else { 500 }, 20_000),
        );
    }
    machine.write("CARD/hwmon/hwmon3/energy1_input", "3000000\n");
    let second = sampler.sample();
    assert!(!second.lacks_rates());
    let busy: Vec<_> =
        second.engines.iter().map(|engine| (engine.name.as_str(), engine.busy_percent)).collect();
    assert_eq!(busy, [("ccs", Some(5.0)), ("rcs", Some(0.0))]);
    assert!(second.power.unwrap().watts.unwrap() > 0.0);
}

#[test]
fn an_i915_card_is_read_in_full() {
    let client = |ns: u64| {
        format!(
            "drm-driver:\ti915\ndrm-client-id:\t39\ndrm-pdev:\t{PCI}\ndrm-total-system0:\t6044 KiB\n\
             drm-resident-system0:\t6044 KiB\ndrm-total-local0:\t1024 KiB\ndrm-resident-local0:\t512 KiB\n\
             drm-engine-render:\t346249 ns\ndrm-engine-compute:\t{ns} ns\ndrm-engine-capacity-compute:\t2\n"
        )
    };
    let machine = Machine::new(&[
        ("proc/self/fdinfo/5", &client(0)),
        ("CARD/drm/card1/gt/gt0/rps_act_freq_mhz", "0\n"),
        ("CARD/drm/card1/gt/gt0/rps_cur_freq_mhz", "300\n"),
        ("CARD/drm/card1/gt/gt0/rps_min_freq_mhz", "300\n"),
        ("CARD/drm/card1/gt/gt0/rps_max_freq_mhz", "2450\n"),
        ("CARD/drm/card1/gt/gt0/throttle_reason_status", "1\n"),
        ("CARD/drm/renderD129/dev", "226:129\n"),
        ("CARD/hwmon/hwmon1/energy2_input", "500\n"),
        ("CARD/hwmon/hwmon1/power1_max", "0\n"),
        ("CARD/hwmon/hwmon1/power1_rated_max", "190000000\n"),
        ("CARD/resource", "0x0 0x0 0x0\n0x0 0x0 0x0\n0x0000004000000000 0x000000400fffffff 0x14220c\n"),
        (
            "sys/kernel/debug/dri/0000:03:00.0/gt0/uc/guc_info",
            "GuC firmware: i915/dg2_guc_70.bin\n\tstatus: RUNNING\n\tversion: wanted 70.5.1, found 70.58.0\n",
        ),
    ]);
    machine.driver("i915");
    let mut sampler = machine.sampler(Some(16 << 30));
    let first = sampler.sample();
    assert_eq!(first.driver.as_deref(), Some("i915"));
    assert_eq!(first.vram.unwrap().allocated_bytes, Some(1 << 20));
    assert_eq!(first.vram.unwrap().resident_bytes, Some(512 << 10));
    assert_eq!(first.gtt_bytes, Some(6044 << 10));
    assert_eq!(first.frequency.unwrap().max_mhz, Some(2450));
    let power = first.power.unwrap();
    assert_eq!((power.limit_watts, power.energy_joules), (Some(190.0), Some(0.0005)));
    assert_eq!(first.bar, Some(Bar { size_bytes: 256 << 20, whole: Some(false) }));
    assert_eq!(first.guc.as_ref().unwrap().version, "70.58.0");
    for (warning, part) in
        first.warnings.iter().zip(["70.58.0 is older than 70.65", "256 MiB", "slows itself down"])
    {
        assert!(warning.contains(part), "{warning}");
    }
    assert_eq!(first.warnings.len(), 3);

    std::thread::sleep(std::time::Duration::from_millis(20));
    machine.write("proc/self/fdinfo/5", &client(10_000_000));
    let second = sampler.sample();
    let compute = second.engines.iter().find(|engine| engine.name == "compute").unwrap();
    let busy = compute.busy_percent.unwrap();
    // 10 ms on two engines within 20 ms or a little more.
    assert!(busy > 0.0 && busy <= 25.0, "{busy}");
}

#[test]
fn the_services_copy_of_the_firmware_is_read() {
    for place in ["run/axed/firmware", "run/axed/0000:03:00.0/firmware"] {
        let machine = Machine::new(&[
            (&format!("{place}/1/name"), "xe dev=0000:03:00.0 unique=0000:03:00.0\n"),
            (
                &format!("{place}/1/tile0/gt0/uc/guc_info"),
                "GuC firmware: xe/bmg_guc_70.bin\n\tfound 70.44.1\n",
            ),
        ]);
        let gpu = machine.sampler(None).sample();
        assert_eq!(gpu.guc.unwrap().version, "70.44.1", "{place}");
        assert_eq!(gpu.warnings.len(), 1, "{place}");
    }
}

#[test]
fn clocks_of_old_i915_kernels() {
    let machine = Machine::new(&[("CARD/drm/card0/gt_act_freq_mhz", "1150\n")]);
    assert_eq!(machine.sampler(None).sample().frequency.unwrap().actual_mhz, Some(1150));
}

#[test]
fn the_host_is_read_without_a_card() {
    let machine = Machine::new(&[
        ("proc/meminfo", "MemTotal:       24567890 kB\nMemFree:        100 kB\nMemAvailable:   2000 kB\n"),
        ("proc/self/status", "Name:\taxed\nVmRSS:\t  180000 kB\nRssAnon:\t   50000 kB\n"),
        ("proc/loadavg", "0.52 1.25 2.00 1/345 6789\n"),
        ("proc/cpuinfo", "processor\t: 0\ncpu MHz\t\t: 2600.112\n"),
        ("sys/class/hwmon/hwmon0/name", "nvme\n"),
        ("sys/class/hwmon/hwmon0/temp1_input", "30000\n"),
        ("sys/class/hwmon/hwmon1/name", "k10temp\n"),
        ("sys/class/hwmon/hwmon1/temp1_input", "48250\n"),
    ]);
    let gpu = Sampler::at(machine.root.path()).sample();
    assert!(!gpu.lacks_rates() && gpu.pci.is_none());
    assert_eq!(gpu.host.cpu_mhz, Some(2600));
    assert_eq!(gpu.host.memory_total_bytes, Some(24_567_890 << 10));
    assert_eq!(gpu.host.memory_available_bytes, Some(2000 << 10));
    assert_eq!((gpu.host.rss_bytes, gpu.host.rss_anon_bytes), (Some(180_000 << 10), Some(50_000 << 10)));
    assert_eq!(gpu.host.load, Some([0.52, 1.25, 2.0]));
    assert_eq!(gpu.host.cpu_celsius, Some(48.25));
}

#[test]
fn the_processor_may_be_a_thermal_zone() {
    let machine = Machine::new(&[
        ("sys/class/thermal/thermal_zone0/type", "acpitz\n"),
        ("sys/class/thermal/thermal_zone0/temp", "27800\n"),
        ("sys/class/thermal/thermal_zone1/type", "x86_pkg_temp\n"),
        ("sys/class/thermal/thermal_zone1/temp", "55000\n"),
    ]);
    assert_eq!(Sampler::at(machine.root.path()).sample().host.cpu_celsius, Some(55.0));
}

#[test]
fn nothing_at_all_is_no_failure() {
    let empty = Machine::new(&[]);
    let mut sampler = empty.sampler(None);
    for _ in 0..2 {
        let gpu = sampler.sample();
        assert_eq!(gpu, Gpu { pci: Some(PCI.to_owned()), ..Gpu::default() });
    }
}

#[test]
fn nonsense_in_files_is_no_failure_and_no_figure() {
    let machine = Machine::new(&[
        (
            "proc/self/fdinfo/5",
            &format!(
                "drm-pdev: {PCI}\ndrm-total-vram0: many\ndrm-cycles-ccs: -1\ndrm-resident-vram0: 5 parsecs\n:::\n"
            ),
        ),
        ("CARD/resource", "0x0\n0x0 0x0\n0x9 0x3 0x0\n"),
        ("CARD/hwmon/hwmon3/temp1_input", "hot\n"),
        ("CARD/hwmon/hwmon3/energy1_input", "\n"),
        ("proc/loadavg", "1.0\n"),
        ("proc/meminfo", "MemTotal: 99999999999999999999 kB\n"),
        ("sys/kernel/debug/dri/0000:03:00.0/gt0/uc/guc_info", "found nothing\n"),
    ]);
    let gpu = machine.sampler(None).sample();
    assert_eq!(gpu, Gpu { pci: Some(PCI.to_owned()), ..Gpu::default() });
}

#[test]
fn busy_processors_are_counted_between_samples() {
    let stat = |user: u64, system: u64| {
        format!("42 (a (b) c) S 1 42 42 0 -1 4194304 900 0 0 0 {user} {system} 0 0 20 0 9 0 100 1 1\n")
    };
    assert_eq!(ticks(&stat(70, 30)), Some(100));
    assert_eq!(ticks("42 (a) S 1"), None);
    let machine = Machine::new(&[("proc/self/stat", &stat(70, 30))]);
    let mut sampler = Sampler::at(machine.root.path());
    assert_eq!(sampler.sample().host.busy_processors, None);
    std::thread::sleep(std::time::Duration::from_millis(20));
    machine.write("proc/self/stat", &stat(72, 30));
    let busy = sampler.sample().host.busy_processors.unwrap();
    // 20 ms of work within 20 ms or a little more.
    assert!(busy > 0.0 && busy <= 1.0, "{busy}");
}

#[test]
fn a_small_window_is_known_without_the_cards_memory() {
    let window = |end: &str| {
        let machine = Machine::new(&[(
            "CARD/resource",
            &format!("0x0 0x0 0x0\n0x0 0x0 0x0\n0x4000000000 {end} 0x0\n"),
        )]);
        machine.sampler(None).sample().bar.unwrap().whole
    };
    assert_eq!(window("0x400fffffff"), Some(false));
    assert_eq!(window("0x47ffffffff"), None);
}

#[test]
fn cards_are_intels_display_controllers() {
    let machine = Machine::new(&[
        ("CARD/vendor", "0x8086\n"),
        ("CARD/class", "0x030000\n"),
        ("sys/bus/pci/devices/0000:00:1f.3/vendor", "0x8086\n"),
        ("sys/bus/pci/devices/0000:00:1f.3/class", "0x040300\n"),
        ("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n"),
        ("sys/bus/pci/devices/0000:01:00.0/class", "0x030000\n"),
    ]);
    assert_eq!(Sampler::at(machine.root.path()).cards(), [PCI]);
}

#[test]
fn this_machine_has_memory() {
    let host = Sampler::new().sample().host;
    assert!(host.rss_bytes.unwrap() > 1 << 20 && host.memory_total_bytes.unwrap() > host.rss_bytes.unwrap());
}
