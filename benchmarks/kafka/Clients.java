import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Properties;
import java.util.UUID;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.TopicExistsException;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/** What benchmarks/client_work.py does with our clients, with Kafka's: SERVERS WORK TOPIC COUNT. Prints one JSON document. */
public class Clients {
    static final int PARTITIONS = 3;
    static final int PRODUCERS = 16;
    static final byte[] VALUE = new byte[100];

    public static void main(String[] given) throws Exception {
        String servers = given[0], work = given[1], topic = given[2];
        int count = Integer.parseInt(given[3]), replicas = Integer.parseInt(given[4]);
        create(servers, topic, replicas);
        switch (work) {
            case "append" -> append(servers, topic, count);
            case "producers" -> producers(servers, topic, count);
            case "send" -> send(servers, topic, count, Map.of());
            case "batches" -> send(servers, topic, count, Map.of(
                "batch.size", "1048576", "linger.ms", "20", "buffer.memory", "268435456", "max.request.size", "16777216"));
            case "consume" -> consume(servers, topic, count);
            default -> throw new IllegalArgumentException(work);
        }
    }

    static void create(String servers, String topic, int replicas) throws Exception {
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", servers))) {
            Map<String, String> config = Map.of("min.insync.replicas", replicas > 1 ? "2" : "1");
            admin.createTopics(List.of(new NewTopic(topic, PARTITIONS, (short) replicas).configs(config))).all().get();
        } catch (ExecutionException error) {
            if (!(error.getCause() instanceof TopicExistsException)) {
                throw error;
            }
        }
    }

    static KafkaProducer<byte[], byte[]> producer(String servers, Map<String, String> more) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", servers);
        settings.put("acks", "all");
        settings.putAll(more);
        return new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer());
    }

    /** One record after the other, each awaited. */
    static void append(String servers, String topic, int count) throws Exception {
        double[] took = new double[count];
        try (KafkaProducer<byte[], byte[]> producer = producer(servers, Map.of("linger.ms", "0"))) {
            for (int number = -count; number < count; number++) {
                long began = System.nanoTime();
                producer.send(new ProducerRecord<>(topic, VALUE)).get();
                if (number >= 0) {
                    took[number] = (System.nanoTime() - began) / 1e6;
                }
            }
        }
        Arrays.sort(took);
        print("\"p50_ms\": %.3f, \"p99_ms\": %.3f", took[count / 2], took[count * 99 / 100]);
    }

    /** Many producers at once, each of which awaits each of its records. */
    static void producers(String servers, String topic, int count) throws Exception {
        CountDownLatch ready = new CountDownLatch(PRODUCERS), go = new CountDownLatch(1);
        List<Thread> threads = new ArrayList<>();
        for (int number = 0; number < PRODUCERS; number++) {
            Thread thread = new Thread(() -> {
                try (KafkaProducer<byte[], byte[]> producer = producer(servers, Map.of("linger.ms", "0"))) {
                    for (int warm = 0; warm < count / PRODUCERS / 2; warm++) {
                        producer.send(new ProducerRecord<>(topic, VALUE)).get();
                    }
                    ready.countDown();
                    go.await();
                    for (int sent = 0; sent < count / PRODUCERS; sent++) {
                        producer.send(new ProducerRecord<>(topic, VALUE)).get();
                    }
                } catch (Exception error) {
                    throw new RuntimeException(error);
                }
            });
            thread.start();
            threads.add(thread);
        }
        ready.await();
        long began = System.nanoTime();
        go.countDown();
        for (Thread thread : threads) {
            thread.join();
        }
        rate(count / PRODUCERS * PRODUCERS, began);
    }

    /** One thread sends records one by one, until the last is acknowledged. */
    static void send(String servers, String topic, int count, Map<String, String> more) throws Exception {
        try (KafkaProducer<byte[], byte[]> producer = producer(servers, more)) {
            sent(producer, topic, count / 2);
            long began = System.nanoTime();
            List<Future<RecordMetadata>> futures = sent(producer, topic, count);
            long ended = System.nanoTime();
            for (Future<RecordMetadata> future : futures) {
                future.get();
            }
            print("\"records_per_s\": %.0f", count / ((ended - began) / 1e9));
        }
    }

    static List<Future<RecordMetadata>> sent(KafkaProducer<byte[], byte[]> producer, String topic, int count) {
        List<Future<RecordMetadata>> futures = new ArrayList<>(count);
        for (int number = 0; number < count; number++) {
            futures.add(producer.send(new ProducerRecord<>(topic, VALUE)));
        }
        producer.flush();
        return futures;
    }

    /** The first `count` records of the topic, read twice: the first time warms up. */
    static void consume(String servers, String topic, int count) {
        for (int round = 0; round < 2; round++) {
            Properties settings = new Properties();
            settings.put("bootstrap.servers", servers);
            settings.put("max.poll.records", "100000");
            settings.put("max.partition.fetch.bytes", "33554432");
            settings.put("fetch.max.bytes", "67108864");
            settings.put("receive.buffer.bytes", "4194304");
            settings.put("group.id", UUID.randomUUID().toString());
            settings.put("enable.auto.commit", "false");
            var bytes = new ByteArrayDeserializer();
            try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(settings, bytes, bytes)) {
                List<TopicPartition> partitions = new ArrayList<>();
                for (int number = 0; number < PARTITIONS; number++) {
                    partitions.add(new TopicPartition(topic, number));
                }
                consumer.assign(partitions);
                consumer.seekToBeginning(partitions);
                long began = System.nanoTime();
                int read = 0;
                while (read < count) {
                    read += consumer.poll(Duration.ofSeconds(1)).count();
                }
                if (round == 1) {
                    rate(read, began);
                }
            }
        }
    }

    static void rate(int count, long began) {
        print("\"records_per_s\": %.0f", count / ((System.nanoTime() - began) / 1e9));
    }

    static void print(String figures, Object... values) {
        System.out.println("{" + String.format(Locale.ROOT, figures, values) + "}");
    }
}
